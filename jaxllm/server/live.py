"""What the live page shows: queues, pools, decisions and the last minutes, as JSON values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jaxllm
from jaxllm.sched.ledger import PreemptionRecord
from jaxllm.types import Request

if TYPE_CHECKING:
    from jaxllm.server.service import Service

_MAX_REQUESTS = 256


def pools(service: Service) -> dict[str, Any]:
    """Blocks of each tier, by what they are; files in bytes, None if there are none."""
    device, host = service.made.engine.scheduler.usage()
    files = service.made.files
    disk = None if files is None else {"bytes": files.num_bytes, "limit_bytes": files.max_bytes}
    return {"device": device._asdict(), "host": host._asdict(), "disk": disk}


def live(service: Service) -> dict[str, Any]:
    """Everything that the page shows."""
    made, stats = service.made, service.stats
    scheduler, admission, limits = made.engine.scheduler, service.core.admission, service.core.limits
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
            "num_gpu_blocks": limits.num_gpu_blocks,
            "num_host_blocks": limits.num_host_blocks,
            "block_size": limits.block_size,
            "max_num_seqs": limits.max_num_seqs,
            "max_model_len": limits.max_model_len,
            "max_queued_requests": admission.max_requests - limits.max_num_seqs,
            "max_queued_tokens": admission.max_tokens,
            "block_bytes": block_bytes,
        },
        "queues": {
            "waiting": scheduler.num_waiting,
            "running": scheduler.num_running,
            "swapped": scheduler.num_swapped,
        },
        "pool": pools(service),
        "requests": _requests(service),
        "latencies": stats.latencies(),
        "history": stats.history(),
        "decisions": [_decision(when, record) for when, record in reversed(list(stats.decisions))],
        "predictions": {
            str(kind): {"count": report.count, "error": report.error_after, "factor": report.factor}
            for kind, report in made.costs.report().items()
        },
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


def _compiling(service: Service) -> dict[str, int] | None:
    """How many programs there are, of how many known to be needed; None while none is being compiled."""
    progress = service.made.executor.compile_progress()
    if progress.num_compiled == progress.num_programs:
        return None
    return {"num_compiled": progress.num_compiled, "num_programs": progress.num_programs}


def _requests(service: Service) -> list[dict[str, Any]]:
    """Those that hold the most blocks."""
    now = time.monotonic()
    requests = service.made.engine.scheduler.live_requests()
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
