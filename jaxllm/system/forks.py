"""Tells a forked process from the one it comes from: JAX's threads are not in it, so that it would hang."""

from __future__ import annotations

import os

from jaxllm.errors import EngineError

WAY_OUT = (
    "JAX's threads do not live on in a forked process, where it would hang: start processes by spawning "
    "(multiprocessing.get_context('spawn'), or set_start_method('spawn')), and make the LLM in the new one"
)
number = 0
"""How many forks lie between this process and the one that imported the package."""
_of_jax: int | None = None


def note_jax() -> None:
    """Say that JAX is about to be used.

    Raises:
        EngineError: it was used by this package before this process was forked.
    """
    global _of_jax
    if _of_jax is None:
        _of_jax = number
    if _of_jax != number:
        raise EngineError(f"jaxllm was used before the process was forked; {WAY_OUT}")


def _count() -> None:
    global number
    number += 1


os.register_at_fork(after_in_child=_count)
