"""Compiled programs that the engines of a process share: a second engine like the first finds its own."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from typing import Any

import jax

_MAX_PROGRAMS = 128


class SharedPrograms:
    """The programs that were used last, by what they were made from; `jax.clear_caches()` lets go of them.

    Args:
        max_programs: how many are kept.
    """

    def __init__(self, max_programs: int = _MAX_PROGRAMS) -> None:
        self._max_programs, self._lock = max_programs, threading.Lock()
        self._programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._num_traced = self._num_seen = 0
        self._traced = jax.jit(self._count)

    def find(self, made_from: Hashable | None) -> Any | None:
        """One that was kept, or None."""
        if made_from is None:
            return None
        made_from = made_from, _settings()
        with self._lock:
            self._forget_if_cleared()
            if made_from in self._programs:
                self._programs.move_to_end(made_from)
            return self._programs.get(made_from)

    def keep(self, made_from: Hashable | None, program: Any) -> None:
        """Keep one for those made from the same, under the same settings of JAX; of None nobody is."""
        if made_from is None:
            return
        made_from = made_from, _settings()
        with self._lock:
            self._forget_if_cleared()
            self._programs[made_from] = program
            self._programs.move_to_end(made_from)
            while len(self._programs) > self._max_programs:
                self._programs.popitem(last=False)

    def _count(self) -> int:
        self._num_traced += 1
        return 0

    def _forget_if_cleared(self) -> None:
        """What JAX traces anew it has forgotten."""
        self._traced.eval_shape()
        if self._num_traced != self._num_seen:
            self._num_seen = self._num_traced
            self._programs.clear()


def _settings() -> str:
    """JAX's settings, any of which may change a program."""
    return repr([getattr(jax.config, name, None) for name in jax.config.values])


SHARED = SharedPrograms()
