"""What an engine holds on its device: weights that may be replaced, and memory that may be lent to others."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxllm.engine.engine import Engine
from jaxllm.engine.thread import EngineThread
from jaxllm.errors import CapacityError, ConfigError, WeightsError, shown
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.loading.given import check_given, iter_given
from jaxllm.pallas_kernels.settings import under_jax_defaults

_logger = logging.getLogger(__name__)
WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""What may be let go of, by vLLM's names."""


class Residence:
    """The weights and the KV pool of an engine on its device.

    Args:
        engine: of the executor.
        thread: runs it.
        executor: holds them.
        device: where.
        reload: reads the weights of the checkpoint again; None if they were given.
        is_other: whether the checkpoint has other weights by now than those that files are of.
    """

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        executor: ModelExecutor,
        device: jax.Device,
        reload: Callable[[], Iterator[tuple[str, jax.Array]]] | None,
        is_other: Callable[[], bool],
    ) -> None:
        self._engine, self._thread, self._executor = engine, thread, executor
        self._device, self._reload, self._is_other = device, reload, is_other

    @under_jax_defaults
    def update_weights(self, params: Mapping[str, Any]) -> None:
        """Compute with other weights from now on; see `LLM.update_weights`."""
        executor = self._executor
        check_given(executor.model_config, params)
        formats = executor.config.formats
        static = [name for name, held in formats.others if held.has_stored_inputs]
        if static:
            raise WeightsError(
                f"{static[0]} and {len(static) - 1} more round their inputs by scales of the checkpoint, and "
                "other weights have none: load a checkpoint of 16 or 32 bits"
            )

        stored = formats.default.stored
        if stored and any(str(one.dtype) != stored for one in params.values()):
            _logger.warning(
                "weights are held in %s, as those of the checkpoint: others are rounded to it; "
                'dtype="float32" holds all of float32',
                stored,
            )

        def change() -> None:
            executor.replace_weights(iter_given(params, executor.config.dtype, self._device))
            self._forget_files()
            self._reload = None

        # Of weights that are there some would be old ones.
        self._change(change, () if executor.has_weights else (CapacityError,))

    def sleep(self, level: int) -> None:
        """Let go of the pool, and of the weights at level 2; see `LLM.sleep`."""
        if isinstance(level, bool) or level not in (1, 2):
            raise ConfigError(
                f"level={shown(level)} must be 1, which gives back the KV pool, or 2, which gives back the "
                "weights as well"
            )
        if self._engine.is_closed:
            self._change(lambda: None)  # which says why
        if self._executor.has_pool or (level == 2 and self._executor.has_weights):
            self._change(lambda: self._executor.let_go(weights=level == 2))

    @under_jax_defaults
    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take back what was let go of; see `LLM.wake_up`."""
        wanted = (WEIGHTS, KV_CACHE) if tags is None else tags
        is_list = isinstance(wanted, list | tuple | set | frozenset)
        if not is_list or not all(tag in (WEIGHTS, KV_CACHE) for tag in wanted):
            raise ConfigError(f"tags={shown(tags)} must be a list of {WEIGHTS!r} and {KV_CACHE!r}, or None")
        executor, reload = self._executor, self._reload
        if self._engine.is_closed:
            self._change(lambda: None)  # which says why
        needs_weights = WEIGHTS in wanted and not executor.has_weights
        needs_pool = KV_CACHE in wanted and not executor.has_pool
        if not (needs_weights or needs_pool):
            return
        if needs_weights and reload is None:
            raise ConfigError(
                "the weights were given, and are gone since sleep(level=2): call update_weights(params), and "
                "then wake_up()"
            )

        def change() -> None:
            if needs_weights and reload is not None:
                executor.replace_weights(reload())
                if self._is_other():
                    self._forget_files()
            if needs_pool:
                executor.remake_pool()

        self._change(change, (CapacityError, ConfigError, WeightsError))

    def _forget_files(self) -> None:
        """Those are of other weights."""
        self._executor.forget_files(json.dumps({"weights": uuid.uuid4().hex}))

    def _change(self, change: Callable[[], object], lacking: tuple[type[Exception], ...] = ()) -> None:
        """Make a change that no request may live through; what is `lacking` leaves the engine asleep."""
        found: list[Exception] = []

        def whole() -> None:
            try:
                change()
            except lacking as error:  # there is nothing wrong with the engine
                found.append(error)
            self._engine.is_asleep = not (self._executor.has_pool and self._executor.has_weights)

        self._thread.call(lambda: self._engine.while_idle(whole))
        if found:
            raise found[0]
