"""How many KV blocks fit: device memory less weights and temporaries, or what the user asks for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax

from jaxllm.errors import CapacityError, ConfigError
from jaxllm.models.architecture import ModelConfig
from jaxllm.system.dtypes import ITEMSIZES, kv_row_bytes

_GIB = 2**30
_CPU_KV_CACHE_BYTES = 4 * 2**30
_DEFAULT_UTILIZATION = 0.95
_LIMITS = ((1024, 8192), (512, 8192), (256, 2048))  # sequences, tokens of a step
_CPU_LIMITS = 64, 512
_TOKENS_EACH = 512
_MOST_TEMPORARIES = 0.1

MEM_FRACTION = 0.95
"""Share of a GPU's memory that JAX's allocator is to take (XLA_PYTHON_CLIENT_MEM_FRACTION)."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """What something beside the model takes: bytes of weights, of temporaries, and for each block.

    It wants steps to keep `num_hidden` hidden states of each slot, and what `kept_layers` are given.
    """

    weight_bytes: int = 0
    temporary_bytes: int = 0
    bytes_per_block: int = 0
    num_hidden: int = 0
    kept_layers: tuple[int, ...] = ()


def block_bytes(config: ModelConfig, block_size: int, kv_dtype: str) -> int:
    """Bytes of one KV block over all layers (Eq. 3 of the AdaptiveLLM paper, with num_kv_heads heads)."""
    row_bytes = kv_row_bytes(kv_dtype, config.head_dim)
    return 2 * config.num_layers * config.num_kv_heads * block_size * row_bytes


def temporary_bytes(config: ModelConfig, num_tokens: int, num_rows: int, itemsize: int) -> int:
    """A generous estimate of a step's temporaries: activations of `num_tokens`, logits of `num_rows`."""
    width = 4 * config.hidden_size + 3 * config.intermediate_size
    width += 3 * config.num_heads * config.head_dim
    return num_tokens * width * max(itemsize, 4) + 8 * num_rows * config.vocab_size * 4


def slot_bytes(max_model_len: int, block_size: int, num_slots: int) -> int:
    """Bytes of the tokens' history and the block tables."""
    return 4 * (num_slots + 1) * (max_model_len + 1 + -(-max_model_len // block_size))


def default_limits(
    config: ModelConfig, dtype: str, weight_bytes: int, memory_bytes: int, kv_dtype: str | None = None
) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens` for a model in so many bytes of an accelerator's memory.

    The most for which temporaries take less than a tenth of it, and the pool has room for 512 tokens of each
    sequence.
    """
    for num_seqs, num_tokens in _LIMITS:
        temporaries = temporary_bytes(config, num_tokens, num_seqs, ITEMSIZES[dtype])
        pool_bytes = memory_bytes * _DEFAULT_UTILIZATION - weight_bytes - temporaries
        needed = num_seqs * _TOKENS_EACH * block_bytes(config, 1, kv_dtype or dtype)
        if temporaries < _MOST_TEMPORARIES * memory_bytes and pool_bytes >= needed:
            return num_seqs, num_tokens
    return _LIMITS[-1]


def device_limits(
    device: jax.Device, config: ModelConfig, dtype: str, weight_bytes: int, kv_dtype: str | None = None
) -> tuple[int, int]:
    """The same for a device; of a CPU 64 sequences and 512 tokens."""
    if device.platform == "cpu":
        return _CPU_LIMITS
    return default_limits(config, dtype, weight_bytes, _device_memory(device)[0], kv_dtype)


def tightest(devices: Sequence[jax.Device]) -> jax.Device:
    """The device with the least free memory."""

    def free(device: jax.Device) -> int:
        total, in_use = _device_memory(device)
        return total - in_use

    return min(devices, key=free)


def _num_sharing(device: jax.Device) -> int:
    """Devices that share a memory: those of a CPU do."""
    return device.client.local_device_count() if device.platform == "cpu" else 1


def _device_memory(device: jax.Device) -> tuple[int, int]:
    """(total, in use) bytes of an accelerator, or for a device of the CPU its share of this machine's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats["bytes_limit"]), int(stats["bytes_in_use"])
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (
        page * os.sysconf(name) // _num_sharing(device) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
    )
    return total, total - free


def check_fits(device: jax.Device, weight_bytes: int, pool_bytes: int) -> None:
    """Verify that a device's memory, be it empty, holds the weights and the pool.

    Raises:
        CapacityError: it does not.
    """
    total, _ = _device_memory(device)
    if weight_bytes + pool_bytes > total:
        raise CapacityError(
            f"weights of {weight_bytes / _GIB:.1f} GiB and a KV pool of {pool_bytes / _GIB:.1f} GiB are more "
            f"than the {total / _GIB:.1f} GiB of the device: choose a smaller model or dtype, or a smaller "
            "pool (num_gpu_blocks_override, kv_cache_memory, gpu_memory_utilization)"
        )


def check_host_fits(pool_bytes: int) -> None:
    """Verify that this machine's memory holds blocks of so many bytes.

    Raises:
        CapacityError: it does not.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if pool_bytes > total:
        raise CapacityError(
            f"blocks of {pool_bytes / _GIB:.1f} GiB are more than the {total / _GIB:.1f} GiB of this "
            "machine: lower num_host_blocks"
        )


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
    4. the default: 0.95 of what JAX takes of an accelerator, or 4 GiB on the CPU.

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
        most = _CPU_KV_CACHE_BYTES // _num_sharing(device)
        available = min(most, (total - in_use - weight_bytes) // 2)
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
