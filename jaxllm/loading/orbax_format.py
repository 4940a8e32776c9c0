"""Weights as Orbax checkpoints: one per group of weights, so that no step holds them all on the host."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxllm.errors import WeightsError
from jaxllm.models.registry import AnyConfig, abstract_params

PARAMS_FOLDER = "params"
_GROUP_BYTES = 4 * 2**30


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[ModuleType]:
    """Orbax, imported on first use (it takes a second), with its log lines and warnings held back."""
    logger = logging.getLogger("absl")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import orbax.checkpoint

            logger.setLevel(logging.CRITICAL)
            yield orbax.checkpoint
        finally:
            logger.setLevel(level)


def has_orbax_params(folder: Path) -> bool:
    """Whether `folder` was written by `jaxllm convert`."""
    return (folder / PARAMS_FOLDER).is_dir()


def save_orbax(folder: Path, weights: Iterable[tuple[str, jax.Array]]) -> None:
    """Write `weights` under `folder`/params, holding up to 4 GiB (or one weight) at a time."""
    group: dict[str, jax.Array] = {}
    size = count = 0
    for name, array in weights:
        if group and size + array.nbytes > _GROUP_BYTES:
            _save_group(folder / PARAMS_FOLDER / f"{count:05d}", group)
            group, size, count = {}, 0, count + 1
        group[name] = array
        size += array.nbytes
    _save_group(folder / PARAMS_FOLDER / f"{count:05d}", group)


def _save_group(path: Path, group: dict[str, jax.Array]) -> None:
    with _quiet_orbax() as ocp, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.resolve(), group)


def load_orbax(
    folder: Path, config: AnyConfig, dtype: str, placement: jax.Device | jax.sharding.Sharding
) -> Iterator[tuple[str, jax.Array]]:
    """Yield every weight, restored onto the device in `dtype`.

    Raises:
        WeightsError: weights are missing, unexpected or misshapen (all are named), or a group is corrupt.
    """
    sharding = (
        jax.sharding.SingleDeviceSharding(placement) if isinstance(placement, jax.Device) else placement
    )
    groups = sorted(path.resolve() for path in (folder / PARAMS_FOLDER).iterdir() if path.is_dir())
    with _quiet_orbax() as ocp, ocp.StandardCheckpointer() as checkpointer:
        stored = {path: _metadata(checkpointer, path) for path in groups}
        _check_match(stored, config, folder)
        for path, arrays in stored.items():
            targets = {
                name: jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
                for name, array in arrays.items()
            }
            try:
                restored = checkpointer.restore(path, targets)
            except Exception as error:
                _discard_suspended_reads(error)
                raise _unreadable(path, error) from error
            while restored:
                yield restored.popitem()


def _discard_suspended_reads(error: Exception) -> None:
    """Collect, in silence, the coroutines that Orbax left suspended when a read failed with `error`.

    Each prints a traceback when it is collected, at whatever moment that happens to be. What else is
    collected here and fails is reported as ever.
    """
    hook, logger = sys.unraisablehook, logging.getLogger("asyncio")
    level = logger.level

    def report(unraisable: sys.UnraisableHookArgs) -> None:
        if not inspect.iscoroutine(unraisable.object):
            hook(unraisable)

    chain: list[BaseException] = [error]
    for one in chain:  # frames of any of them may hold the coroutines
        linked = (one.__cause__, one.__context__)
        chain += [other for other in linked if other is not None and other not in chain]
    try:
        sys.unraisablehook = report
        logger.setLevel(logging.CRITICAL)
        for one in chain:
            traceback.clear_frames(one.__traceback__)
        gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)


def stored_dtype(folder: Path) -> str | None:
    """Dtype of the weights in `folder`/params."""
    groups = sorted(path.resolve() for path in (folder / PARAMS_FOLDER).iterdir() if path.is_dir())
    with _quiet_orbax() as ocp, ocp.StandardCheckpointer() as checkpointer:
        for path in groups:
            for array in _metadata(checkpointer, path).values():
                return str(array.dtype)
    return None


def _metadata(checkpointer: Any, path: Path) -> dict[str, Any]:
    try:
        return dict(checkpointer.metadata(path).item_metadata.tree)
    except Exception as error:  # Orbax raises many types, KeyError and ValueError among them
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"cannot read the Orbax checkpoint {str(path)!r}: {type(error).__name__}: {error}; "
        "it is incomplete or corrupt, run `jaxllm convert` again"
    )


def _check_match(stored: dict[Path, dict[str, Any]], config: AnyConfig, folder: Path) -> None:
    shapes = {name: tuple(array.shape) for arrays in stored.values() for name, array in arrays.items()}
    expected = {name: struct.shape for name, struct in abstract_params(config, "float32").items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [name for name in shapes if name not in expected],
        "of the wrong shape": [
            f"{name} is {list(shapes[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items)
        raise WeightsError(
            f"the weights of {str(folder)!r} do not match the {config.architecture} of its config.json: "
            + listed
        )
