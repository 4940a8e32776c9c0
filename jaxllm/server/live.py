"""What the live page shows: queues, pools, decisions and the last minutes, as JSON values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jaxllm
from jaxllm.errors import Faults
from jaxllm.predictors.base import CostKind
from jaxllm.predictors.online import KindReport, OnlineCalibration, named
from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import PreemptionRecord
from jaxllm.sched.usage import PoolUsage
from jaxllm.types import Request

if TYPE_CHECKING:
    from jaxllm.server.service import Service

_MAX_REQUESTS = 256


def pools(service: Service) -> dict[str, Any]:
    """Blocks of each tier, of all replicas, by what they are; files in bytes, None if there are none."""
    tiers = zip(*(scheduler.usage() for scheduler in service.schedulers), strict=True)
    device, host = (PoolUsage(*map(sum, zip(*usages, strict=True))) for usages in tiers)
    files = service.made.files
    disk = None if files is None else {"bytes": files.num_bytes, "limit_bytes": files.max_bytes}
    return {"device": device._asdict(), "host": host._asdict(), "disk": disk}


def cost_reports(costs: OnlineCalibration) -> dict[CostKind, KindReport]:
    """How well costs were predicted; nothing where one's own calibration raises, which is logged."""
    with Faults():
        return named(costs).report()
    return {}


def live(service: Service) -> dict[str, Any]:
    """Everything that the page shows: of several replicas the sums, and predictions of the first."""
    made, stats, schedulers = service.made, service.stats, service.schedulers
    admission, limits = service.core.admission, service.core.limits
    count = len(schedulers)
    totals, block_bytes = stats.totals, service.block_bytes
    return {
        "version": jaxllm.__version__,
        "model": service.model_names[0],
        "policy": service.policy_name,
        "started": stats.started,
        "now": time.time(),
        "is_healthy": service.core.is_healthy,
        "compiling": _compiling(service),
        "limits": {
            "num_gpu_blocks": count * limits.num_gpu_blocks,
            "num_host_blocks": count * limits.num_host_blocks,
            "block_size": limits.block_size,
            "max_num_seqs": count * limits.max_num_seqs,
            "max_model_len": limits.max_model_len,
            "max_queued_requests": admission.max_requests - count * limits.max_num_seqs,
            "max_queued_tokens": admission.max_tokens,
            "block_bytes": block_bytes,
        },
        "queues": {
            "waiting": sum(one.num_waiting for one in schedulers),
            "running": sum(one.num_running for one in schedulers),
            "swapped": sum(one.num_swapped for one in schedulers),
        },
        "pool": pools(service),
        "requests": _requests(service),
        "latencies": stats.latencies(),
        "history": stats.history(),
        "decisions": [_decision(when, record) for when, record in reversed(list(stats.decisions))],
        "predictions": {
            str(kind): {"count": report.count, "error": report.error_after, "factor": report.factor}
            for kind, report in cost_reports(made.costs).items()
        },
        "drafts": _drafts(service),
        "totals": {
            "requests": totals.requests,
            "refused": totals.refused,
            "output_tokens": totals.output_tokens,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": sum(totals.cached_tokens.values()),
            "preemptions_swap": totals.preemptions_swap,
            "preemptions_recompute": totals.preemptions_recompute,
            "swapped_bytes": (totals.blocks_out + totals.blocks_in) * block_bytes,
            "recomputed_tokens": totals.recomputed_tokens,
        },
    }


def _drafts(service: Service) -> dict[str, float | None] | None:
    """What became of drafts, and tokens/s with them over those without; None where nothing drafts."""
    found = [one.speculation for one in service.schedulers if one.speculation is not None]
    if not found:
        return None
    gains = Gains()
    for one in found:
        gains.add_all(one.gains)
    return {
        "verifications": sum(one.counts.num_verifications for one in found),
        "drafted": sum(one.counts.num_drafted for one in found),
        "kept": sum(one.counts.num_kept for one in found),
        "predicted_gain": gains.predicted_gain,
        "measured_gain": gains.measured_gain,
    }


def _compiling(service: Service) -> dict[str, int] | None:
    """How many programs there are, of how many known to be needed; None while none is being compiled."""
    found = [one.executor.compile_progress() for one in service.replicas]
    num_compiled = sum(one.num_compiled for one in found)
    num_programs = sum(one.num_programs for one in found)
    if num_compiled == num_programs:
        return None
    return {"num_compiled": num_compiled, "num_programs": num_programs}


def _requests(service: Service) -> list[dict[str, Any]]:
    """Those that hold the most blocks."""
    now = time.monotonic()
    requests = [one for scheduler in service.schedulers for one in scheduler.live_requests()]
    requests.sort(key=lambda one: (-len(one.block_ids), -len(one.host_blocks), one.arrival_index))
    return [_request(one, now) for one in requests[:_MAX_REQUESTS]]


def _request(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "status": request.status.value,
        "num_tokens": request.num_tokens,
        "num_prompt_tokens": request.num_prompt_tokens,
        "max_total_tokens": request.max_total_tokens,
        "device_blocks": len(request.block_ids),
        "host_blocks": len(request.host_blocks),
        "age_seconds": round(now - request.arrival_time, 3),
        "num_preemptions": request.metrics.num_preemptions,
    }


def _decision(when: float, record: PreemptionRecord) -> dict[str, Any]:
    return {
        "time": when,
        "request_id": record.request_id,
        "action": "swap" if record.is_swap else "recompute",
        "num_tokens": record.num_tokens,
        "num_blocks": record.num_blocks,
        "swap_ms": _milliseconds(record.swap_seconds),
        "recompute_ms": _milliseconds(record.recompute_seconds),
        "is_back": record.resumed_time is not None,
        "measured_ms": _milliseconds(record.measured_seconds),
        "regret_ms": _milliseconds(record.regret_seconds),
        "bound_ms": _milliseconds(record.bound_seconds),
        "regret_bound_ms": _milliseconds(record.regret_bound_seconds),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)
