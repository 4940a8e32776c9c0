"""How far a job of many rows is: a bar on a terminal, elsewhere a line a minute, and a last line."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from jaxllm.commands.options import note

if TYPE_CHECKING:
    from jaxllm.engine.outputs import RequestOutput

_SECONDS_BETWEEN_LINES = 60.0


class Progress:
    """Counts answers; a context manager, at whose end it says what there was in all.

    Args:
        total: rows of the job.
        num_done: those that were answered before.
        what: a row is called, such as "prompt".
        quiet: say nothing.
    """

    def __init__(self, total: int, num_done: int, what: str, *, quiet: bool) -> None:
        self._total, self._num_before, self._num_done = total, num_done, num_done
        self._what, self._quiet = what, quiet
        self._num_tokens = self._num_prompt_tokens = self._num_cached = self._num_preemptions = 0
        self._has_outputs = False
        self._bar: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def __enter__(self) -> Progress:
        """Begin to count seconds."""
        self._began = time.monotonic()
        if self._quiet:
            return self
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=self._num_done, desc="Answered", unit=self._what, leave=False
            )
        else:
            self._thread = threading.Thread(target=self._tell, name="jaxllm-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Say the last line."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()  # or a line of its own comes after the last one
        if self._bar is not None:
            self._bar.close()
        if not self._quiet and self._num_done > self._num_before:
            note(self.line())

    def advance(self, count: int = 1, output: RequestOutput | None = None) -> None:
        """Count rows as answered, and the tokens of an output."""
        self._num_done += count
        if output is not None:
            self._has_outputs = True
            self._num_tokens += sum([len(one.token_ids) for one in output.outputs])
            self._num_prompt_tokens += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens
            if output.metrics is not None:
                self._num_preemptions += output.metrics.num_preemptions
        if self._bar is not None:
            self._bar.update(count)

    def line(self) -> str:
        """How far it is."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        num_now, num_left = self._num_done - self._num_before, self._total - self._num_done
        parts = [f"{self._num_done:,} of {self._total:,} {self._what}s in {_duration(seconds)}"]
        if self._has_outputs:
            parts.append(f"{self._num_tokens / seconds:,.0f} output tokens/s")
            parts.append(f"{self._num_preemptions:,} preemptions")
            if self._num_prompt_tokens:
                share = self._num_cached / self._num_prompt_tokens
                parts.append(f"{share:.0%} of prompt tokens found in the prefix cache")
        if num_left and num_now:
            parts.append(f"about {_duration(seconds * num_left / num_now)} left")
        return "; ".join(parts)

    def _tell(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            note(self.line())


def _duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"
