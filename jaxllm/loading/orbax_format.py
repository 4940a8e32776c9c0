"""Weights as Orbax checkpoints: one per group of weights, so that no step holds them all on the host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxllm.errors import WeightsError
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import abstract_params

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


class _FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that ends what it has begun before it closes.

    Orbax closes its loop as soon as one of many reads fails. The others would stay suspended, each with a
    traceback to print when it is collected, and TensorStore's threads would call a loop that is closed.
    """

    def close(self) -> None:
        """Close it when every task has ended, and whoever waits for one knows; their errors are nobody's."""
        while not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if not self.is_closed():
            self.run_until_complete(asyncio.sleep(0))
        super().close()


_LOOPS_LOCK = threading.Lock()


@contextlib.contextmanager
def _finishing_loops() -> Iterator[None]:
    """Has Orbax, which makes its event loops itself, make such as finish."""
    with _LOOPS_LOCK:
        new_event_loop = asyncio.new_event_loop
        asyncio.new_event_loop = _FinishingLoop
        try:
            yield
        finally:
            asyncio.new_event_loop = new_event_loop


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
    folder: Path, config: ModelConfig, dtype: str, placement: jax.Device | jax.sharding.Sharding
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
                with _finishing_loops():
                    restored = checkpointer.restore(path, targets)
            except Exception as error:
                raise _unreadable(path, error) from error
            while restored:
                yield restored.popitem()


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
        with _finishing_loops():
            return dict(checkpointer.metadata(path).item_metadata.tree)
    except Exception as error:  # Orbax raises many types, KeyError and ValueError among them
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"cannot read the Orbax checkpoint {str(path)!r}: {type(error).__name__}: {error}; "
        "it is incomplete or corrupt, run `jaxllm convert` again"
    )


def _check_match(stored: dict[Path, dict[str, Any]], config: ModelConfig, folder: Path) -> None:
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
