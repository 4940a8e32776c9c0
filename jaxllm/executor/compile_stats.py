"""Counts XLA compilations, so that "nothing compiles after warm-up" is a number."""

from __future__ import annotations

import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0
_seconds = 0.0
_listening = False


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _count, _seconds
    if event == _EVENT:
        with _lock:
            _count += 1
            _seconds += duration_secs


def start() -> None:
    """Begin counting; safe to call often."""
    global _listening
    with _lock:
        if _listening:
            return
        _listening = True
    jax.monitoring.register_event_duration_secs_listener(_on_duration)


def total() -> tuple[int, float]:
    """Programs compiled (or loaded from the persistent cache) since `start`, and the seconds that took."""
    with _lock:
        return _count, _seconds
