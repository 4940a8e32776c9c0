"""An engine over several processes: what they agree upon, and what those do that follow (`nnodes`)."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import pathlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from jaxllm.engine import sizing
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.models import Model, placements, read_model
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.executor.kv.agreement import Reporter
from jaxllm.executor.kv.file_digests import weights_fingerprint
from jaxllm.executor.processes.links import Follower, Leader
from jaxllm.executor.step_programs import Key, StepPrograms
from jaxllm.executor.worker import OPERATIONS, Worker
from jaxllm.loading import iter_params
from jaxllm.models.registry import Params
from jaxllm.pallas_kernels.settings import under_jax_defaults

_OF_EACH = frozenset(
    {
        *("node_rank", "model", "tokenizer", "revision", "download", "download_dir", "skip_tokenizer_init"),
        *("scheduler_policy", "costs", "profile_seconds", "ledger", "async_scheduling", "warm_up"),
        *("compilation_cache_dir", "prefix_cache_dir", "enable_prefix_caching", "seed"),
    }
)
"""Settings that a follower need not have: of where its files are, and of what the leader alone decides."""
_MOST_STEPS = 2
_SECONDS_TO_LOOK = 0.01


def settings_of(config: EngineConfig) -> dict[str, str]:
    """The settings that all processes of an engine must have, as text."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OF_EACH]
    has_folder = config.prefix_cache_dir is not None
    settings = {name: repr(getattr(config, name)) for name in names}
    precision = repr(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    files = "a folder of its own" if has_folder else "None"
    return {**settings, "prefix_cache_dir": files, "jax_default_matmul_precision": precision}


def lead(config: EngineConfig, params: Mapping[str, Any] | None) -> Leader:
    """Wait for the other processes of an engine, and let JAX see the devices of all.

    Raises:
        ConfigError: this process does not lead; another one does not come, or has other settings.
    """
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank} follows, and node_rank=0 has the engine: run `jaxllm serve` with "
            "these settings, or call jaxllm.engine.processes.follow"
        )
    if params is not None:
        raise ConfigError(
            f"params are of one process, and nnodes={config.nnodes} read the checkpoint's: leave one of them "
            "out (update_weights sends weights to all)"
        )
    return Leader((config.master_addr, config.master_port), config.nnodes, settings_of(config))


def agree(
    leader: Leader, config: EngineConfig, model: Model, chosen: sizing.Choices, sizes: sizing.Sizes
) -> sizing.Sizes:
    """Sizes that fit all processes, told to the others."""
    fitting = min(int(blocks) for blocks in leader.ask("blocks").values())
    if fitting < sizes.executor.num_gpu_blocks:
        smaller = dataclasses.replace(
            config, num_gpu_blocks_override=fitting, kv_cache_memory=None, gpu_memory_utilization=None
        )
        sizes = sizing.size(smaller, model, chosen)
    leader.tell("sizes", [_decided(config, sizes), _facts(model, sizes)])
    return sizes


def _decided(config: EngineConfig, sizes: sizing.Sizes) -> dict[str, Any]:
    """Settings by which another process comes to the same sizes and, if there are none, weights."""
    limits = sizes.scheduler
    return {
        "num_gpu_blocks_override": limits.num_gpu_blocks,
        "kv_cache_memory": None,
        "gpu_memory_utilization": None,
        "seed": config.seed,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "num_host_blocks": sizes.executor.num_host_blocks,
    }


def _facts(model: Model, sizes: sizing.Sizes) -> dict[str, str]:
    """What has to be the same in all processes, as text."""
    executor = sizes.executor
    names = [field.name for field in dataclasses.fields(executor)]
    unlike = {"logits_processors", "warms_sampling", "warms_everything"}
    facts = {name: repr(getattr(executor, name)) for name in names if name not in unlike}
    has_files = any(model.folder.glob("*.safetensors"))
    facts["weights"] = weights_fingerprint(model.folder) if has_files else "dummy or converted"
    return {**facts, "model": repr(sizes.model_config)}


def stored(config: EngineConfig, model: Model, sizes: sizing.Sizes) -> Iterator[tuple[str, jax.Array]]:
    """The weights of the checkpoint."""
    return iter_params(
        model.folder,
        sizes.model_config,
        model.dtype,
        load_format=config.load_format,
        seed=config.seed,
        device=model.device,
        formats=sizes.executor.formats,
    )


def placed(model: Model, sizes: sizing.Sizes, weights: Iterable[tuple[str, jax.Array]]) -> Params:
    """Weights where they belong, as far as that is in this process."""
    formats = sizes.executor.formats
    return {
        name: model.placement.placed(sizes.model_config, formats, name, weight) for name, weight in weights
    }


@under_jax_defaults
def follow(config: EngineConfig) -> None:
    """Do what the leader of an engine says, until it ends; then, or when it is gone, this process ends.

    Raises:
        ConfigError: settings are not the leader's, or no leader is there.
        CapacityError: the device cannot hold its part.
        WeightsError: the weights are missing, truncated or do not match.
    """
    address = config.master_addr, config.master_port
    link = Follower(address, config.node_rank, config.nnodes, settings_of(config))
    try:
        _follow(link, config)
    except JaxllmError as error:
        link.say("failed", str(error))
        raise
    except BaseException as error:
        link.say("failed", f"{type(error).__name__}: {error}")
        raise
    link.leave()


def _follow(link: Follower, config: EngineConfig) -> None:
    """Load a part of the model, and do one operation after another."""
    told: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()
    programs: concurrent.futures.Future[StepPrograms] = concurrent.futures.Future()

    def take(name: str, arguments: list[Any]) -> None:
        if name == "compile":
            _compile(link, programs, arguments[0])
        else:
            told.put((name, arguments))

    link.listen(take)
    model = read_model(config, placements(config)[0])
    link.say("blocks", sizing.size(config, model, sizing.choose(config, model)).executor.num_gpu_blocks)
    name, arguments = told.get()
    if name == "end":
        return
    decided, facts = arguments
    config = dataclasses.replace(config, **decided)
    sizes = sizing.size(config, model, sizing.choose(config, model))
    for name, mine in _facts(model, sizes).items():
        if facts.get(name) != mine:
            raise ConfigError(
                f"node_rank={config.node_rank} has another {name} than the leader: {mine[:200]}, not "
                f"{facts.get(name, '')[:200]}"
            )
    programs.set_result(StepPrograms(sizes.model_config, sizes.executor, model.placement))
    weights = placed(model, sizes, stored(config, model, sizes))
    link.say("loaded", None if config.prefix_cache_dir is None else weights_fingerprint(model.folder))
    worker = Worker(sizes.model_config, weights, sizes.executor, model.placement, programs.result())
    link.say("ready")
    _work(link, config, worker, told)


def _work(
    link: Follower, config: EngineConfig, worker: Worker, told: queue.SimpleQueue[tuple[str, list[Any]]]
) -> None:
    """Do one operation after another, and tell between them what has become of files, until the end."""
    under_way: collections.deque[Any] = collections.deque()
    reporter: Reporter | None = None
    while True:
        is_busy = reporter is not None and reporter.is_busy
        if reporter is not None and (news := reporter.news()) is not None:
            link.say("news", news)
        try:
            name, arguments = told.get(timeout=_SECONDS_TO_LOOK if is_busy else None)
        except queue.Empty:
            continue
        if name == "end":
            worker.close_files()
            return
        if name == "keep_files":
            assert config.prefix_cache_dir is not None  # as at the leader
            worker.open_files(pathlib.Path(config.prefix_cache_dir).expanduser(), *arguments)
            assert worker.transfers is not None
            reporter = Reporter(worker.transfers)
            link.say("kept", reporter.kept())
            continue
        result = OPERATIONS[name](worker, *arguments)
        if name == "run":
            under_way.append(result.sampled.tokens)
            if len(under_way) > _MOST_STEPS:  # so that what goes wrong on the device is told
                jax.block_until_ready(under_way.popleft())


def _compile(link: Follower, programs: concurrent.futures.Future[StepPrograms], key: Key) -> None:
    """Compile a program beside all else, and say so."""

    def run() -> None:
        try:
            programs.result().get(key)
        except Exception as error:
            link.say("failed", f"{key.name} cannot be compiled: {error}")
            return
        link.say("compiled", key)

    threading.Thread(target=run, name="jaxllm-compile", daemon=True).start()
