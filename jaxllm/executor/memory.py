"""How many KV blocks fit: device memory less weights and temporaries, or what the user asks for."""

from __future__ import annotations

import os

import jax

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.models.config import ModelConfig

_CPU_KV_CACHE_BYTES = 4 * 2**30
_DEFAULT_UTILIZATION = 0.9


def block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of one KV block over all layers (Eq. 3 of the AdaptiveLLM paper, with num_kv_heads heads)."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * itemsize


def temporary_bytes(config: ModelConfig, num_tokens: int, num_rows: int, itemsize: int) -> int:
    """A generous estimate of a step's temporaries: activations of `num_tokens`, logits of `num_rows`."""
    width = 4 * config.hidden_size + 3 * config.intermediate_size
    width += 3 * config.num_heads * config.head_dim
    return num_tokens * width * max(itemsize, 4) + 8 * num_rows * config.vocab_size * 4


def _device_memory(device: jax.Device) -> tuple[int, int]:
    """(total, in use) bytes of an accelerator, or of this machine for the CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    return total, total - page * os.sysconf("SC_AVPHYS_PAGES")


def num_blocks_that_fit(
    *,
    device: jax.Device,
    weight_bytes: int,
    bytes_per_block: int,
    temporaries: int,
    needed_blocks: int,
    num_gpu_blocks_override: int | None,
    kv_cache_memory: int | None,
    gpu_memory_utilization: float | None,
) -> int:
    """Size the pool. The first of these that is set decides.

    1. `num_gpu_blocks_override`, a count of blocks;
    2. `kv_cache_memory`, bytes;
    3. `gpu_memory_utilization`, the fraction of device memory that weights, temporaries and pool may take;
    4. the default: 0.9 of an accelerator, or 4 GiB on the CPU.

    `weight_bytes` are still to be loaded. Never more than `needed_blocks`, what max_num_seqs requests of
    max_model_len tokens could use.

    Raises:
        ConfigError: a value is out of range, or two of the three are set.
        CapacityError: not one block fits.
    """
    given = {
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "kv_cache_memory": kv_cache_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    chosen = [f"{name}={value}" for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} contradict each other; set one of them")
    if num_gpu_blocks_override is not None:
        if not isinstance(num_gpu_blocks_override, int) or not 1 <= num_gpu_blocks_override < 2**31:
            raise ConfigError(
                f"num_gpu_blocks_override={num_gpu_blocks_override!r} must be an integer from 1 to 2**31 - 1"
            )
        return num_gpu_blocks_override
    if kv_cache_memory is not None:
        if not isinstance(kv_cache_memory, int) or kv_cache_memory < bytes_per_block:
            raise ConfigError(
                f"kv_cache_memory={kv_cache_memory!r} bytes must be an integer of at least one block, "
                f"{bytes_per_block} bytes"
            )
        available = kv_cache_memory
    elif gpu_memory_utilization is None and device.platform == "cpu":
        total, in_use = _device_memory(device)
        available = min(_CPU_KV_CACHE_BYTES, (total - in_use - weight_bytes) // 2)
    else:
        utilization = _DEFAULT_UTILIZATION if gpu_memory_utilization is None else gpu_memory_utilization
        if (
            isinstance(utilization, bool)
            or not isinstance(utilization, int | float)
            or not 0 < utilization <= 1
        ):
            raise ConfigError(f"gpu_memory_utilization={utilization!r} must be a number in (0, 1]")
        total, in_use = _device_memory(device)
        available = int(total * utilization) - in_use - weight_bytes - temporaries
    fitting = available // bytes_per_block
    if fitting < 1:
        raise CapacityError(
            f"no KV block of {bytes_per_block} bytes fits: {available} bytes are left after weights and "
            f"{temporaries} bytes of temporaries; lower max_num_batched_tokens or max_num_seqs, raise "
            "gpu_memory_utilization, or use a smaller model or dtype"
        )
    return min(fitting, needed_blocks)
