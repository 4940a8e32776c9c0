"""Proposers that compute on the device of an executor, and what that takes."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from jaxllm.errors import EngineError
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.sched.proposers import ChainedProposer
from jaxllm.system.threads import WorkingThread, is_interpreter_exiting
from jaxllm.types import Request

_Key = TypeVar("_Key", bound=Hashable)
_NUM_RUNS = 3  # to measure what they take; the first ones take longer


Feed = Callable[[jax.Array, jax.Array], jax.Array]
"""Drafts for an iteration, by `packed` and `lengths` as of `chain.Chain.rows`: gives what that takes."""


class Drafter(ChainedProposer, Protocol):
    """A proposer with weights on the device."""

    def begin(self, requests: Sequence[Request], size: int) -> Feed:
        """Draft for iterations of a batch of `size` that follow one another, for which it is prepared."""
        ...

    def warm_up(self) -> None:
        """Compile what is not compiled, and measure what it takes."""
        ...

    def let_go(self, *, weights: bool) -> None:
        """Give the memory of all but the weights back, and with `weights` theirs; nobody runs."""
        ...

    def take_back(self) -> None:
        """Have all of it again.

        Raises:
            CapacityError: it does not fit any more.
        """
        ...

    def release(self) -> None:
        """Let go of everything: nothing will be drafted any more."""
        ...


def shapes_of(arrays: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)


def placed(arguments: Any, device: jax.Device) -> Any:
    """Shapes of a program's arguments, on a device."""
    here = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments)


class CompiledAhead(abc.ABC, Generic[_Key]):
    """Programs that a thread compiles, one after another.

    Args:
        keys: what is static of each, in that order.
    """

    def __init__(self, keys: Sequence[_Key]) -> None:
        self._keys = keys
        self._compiled: dict[_Key, jax.stages.Compiled] = {}
        self._failure: Exception | None = None
        self._is_closed, self._is_done = False, threading.Event()
        self._precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        WorkingThread(target=self._work, name="jaxllm-compile-draft").start()

    @abc.abstractmethod
    def lower(self, key: _Key) -> jax.stages.Lowered:
        """One that is to be compiled."""

    def finish(self) -> None:
        """Compile what no key stands for, after all others."""

    @property
    def is_ready(self) -> bool:
        """Whether all are compiled.

        Raises:
            Exception: what XLA raised, if one cannot be.
        """
        if self._failure is not None:
            raise self._failure
        return len(self._compiled) == len(self._keys)

    def wait(self) -> None:
        """Until all are compiled; raises as `is_ready`."""
        self._is_done.wait()
        if not self.is_ready:
            raise EngineError("the programs that draft were closed while they were compiled")

    def get(self, key: _Key) -> jax.stages.Compiled:
        """One of them, once they are ready."""
        return self._compiled[key]

    def close(self) -> None:
        """Compile nothing more, and forget them."""
        self._is_closed = True
        self._compiled = {}

    @under_jax_defaults
    def _work(self) -> None:
        try:
            for key in self._keys:
                if self._is_closed or is_interpreter_exiting():
                    return
                with jax.default_matmul_precision(self._precision):
                    self._compiled[key] = self.lower(key).compile()
            self.finish()
        except Exception as error:
            self._failure = error
        finally:
            self._is_done.set()


def seconds_of(call: Callable[[], object]) -> float:
    """What a call takes, of a few the least."""
    took = []
    for _ in range(_NUM_RUNS):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took)


class DraftTimes:
    """Seconds to draft so many tokens of each of so many requests, by the sizes of programs.

    They are measured once. Between one token and the most, which are measured, it is a straight line.

    Args:
        most: most tokens of a request.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: dict[int, tuple[float, float]] = {}  # by size: of one token, and of the most

    def measured(self, size: int, one: float, most: float) -> None:
        """Note what a program of `size` requests takes for one token of each, and for the most."""
        self._ends[size] = one, most

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """Predicted; 0 while nothing is measured."""
        size = self._size(num_requests)
        return 0.0 if size is None else self._line(size, num_tokens)

    def _size(self, num_requests: int) -> int | None:
        sizes = sorted(self._ends)
        return next((size for size in sizes if size >= num_requests), sizes[-1] if sizes else None)

    def _line(self, size: int, num_tokens: int) -> float:
        one, most = self._ends[size]
        return one + (most - one) * (num_tokens - 1) / max(1, self._most - 1)
