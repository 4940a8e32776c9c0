"""Compiled programs that the engines of a process share: a second engine like the first finds its own."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

_MAX_PROGRAMS = 128


class SharedPrograms:
    """The programs that were used last, by what they were made from; `jax.clear_caches()` lets go of them.

    Args:
        max_programs: how many are kept.
    """

    def __init__(self, max_programs: int = _MAX_PROGRAMS) -> None:
        self._max_programs, self._lock = max_programs, threading.Lock()
        self._programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._num_traced = 0
        self._newest: dict[str, int] = {}  # traced under each of the settings
        self._traced = jax.jit(self._trace)

    def settings(self) -> Hashable:
        """What JAX may make other programs under: its settings, all that surrounds a trace, and its caches.

        JAX keeps one trace for each surrounding, of which some is no setting, such as a mesh. One that it
        has forgotten under settings that were seen is traced anew, and then no program is kept.
        """
        with self._lock:
            number, settings = self._traced.eval_shape().shape[0], _settings()
            if number > self._newest.setdefault(settings, number):
                self._newest = {settings: number}
                self._programs.clear()
            return number, settings

    def find(self, made_from: Hashable | None) -> Any | None:
        """One that was kept, or None."""
        with self._lock:
            if made_from in self._programs:
                self._programs.move_to_end(made_from)
            return self._programs.get(made_from)

    def keep(self, made_from: Hashable | None, program: Any) -> None:
        """Keep one for those made from the same, `settings` among it; of None nobody is."""
        if made_from is None:
            return
        with self._lock:
            self._programs[made_from] = program
            self._programs.move_to_end(made_from)
            while len(self._programs) > self._max_programs:
                self._programs.popitem(last=False)

    def _trace(self) -> np.ndarray:
        """What tells one trace from others: its number, as a size."""
        self._num_traced += 1
        return np.zeros(self._num_traced, bool)


def _settings() -> str:
    """JAX's settings, any of which may change a program."""
    return repr([getattr(jax.config, name, None) for name in jax.config.values])


SHARED = SharedPrograms()
