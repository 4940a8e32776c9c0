"""One request's answer: its stream of server-sent events, read as it comes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

REFUSALS = frozenset({429, 503})
"""Statuses by which a server says that it takes no more for now."""
_DATA = b"data:"
_MOST_SHOWN = 500


@dataclasses.dataclass(slots=True)
class Answer:
    """What became of one request. Seconds; times are of the caller's clock.

    Args:
        prompt_len: tokens of the prompt; the server's count once it has told.
        due_time: when the workload has it sent.
        start_time: when it was sent.
        ttft: from sending to the first output.
        itls: between one output and the next. Outputs that arrive together share the time since the one
            before; those that come with the first have no time of their own.
        latency: from sending to the last output; of a request that failed, to its failure.
        output_len: tokens of the output; the number of chunks that brought output if the server tells none.
        text: the output.
        token_ids: the same as token ids, where they were asked for.
        status: of the response; None if there was none.
        error: why it failed; empty if it did not.
        has_usage: whether the server told the numbers of tokens.
        is_sent: False of a request that could not be made.
    """

    prompt_len: int
    due_time: float = 0.0
    start_time: float = 0.0
    ttft: float = 0.0
    itls: list[float] = dataclasses.field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    status: int | None = None
    error: str = ""
    has_usage: bool = False
    is_sent: bool = True

    @property
    def is_refused(self) -> bool:
        """Whether the server took no more."""
        return self.status in REFUSALS

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 if there is none after it."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class AnswerStream:
    """Fills an `Answer` whose request has just been sent.

    An event counts as output if it has a choice, text or not (a token may have none), unless all it tells is
    whose turn it is.

    Args:
        answer: with its `start_time`.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._texts: list[str] = []
        self._last: float | None = None
        self._num_outputs = self._num_new = 0
        self._is_over = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at a time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            payload = line[len(_DATA) :].strip()
            if payload == b"[DONE]":
                self._is_over = True
            elif payload and not self._answer.error:
                self._event(payload)
        if not self._num_new:
            return
        if self._last is None:
            self._answer.ttft = now - self._answer.start_time
        else:
            self._answer.itls += [(now - self._last) / self._num_new] * self._num_new
        self._last = now
        self._num_outputs += self._num_new
        self._num_new = 0

    def close(self) -> None:
        """The stream has ended: put the answer together, or say what it lacked."""
        answer = self._answer
        answer.text = "".join(self._texts)
        if self._last is not None:
            answer.latency = self._last - answer.start_time
            answer.output_len = answer.output_len or self._num_outputs
        if answer.error:
            return
        if not self._is_over:
            answer.error = "the stream broke off before its end"
        elif self._last is None:
            answer.error = "the stream held no output"

    def _event(self, payload: bytes) -> None:
        answer = self._answer
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            answer.error = f"an event is no JSON object: {payload[:80]!r}"
            return
        if event.get("error") is not None:
            answer.error = error_message(event)
            return
        if usage := event.get("usage"):
            answer.output_len, answer.has_usage = usage.get("completion_tokens") or 0, True
            answer.prompt_len = usage.get("prompt_tokens") or answer.prompt_len
        for choice in event.get("choices") or ():
            self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        answer, delta = self._answer, choice.get("delta")
        self._is_over = self._is_over or choice.get("finish_reason") is not None
        if delta is None:
            text = choice.get("text")
        else:
            text = delta.get("content") or delta.get("reasoning_content")
            if "role" in delta and not (text or delta.get("tool_calls") or choice.get("finish_reason")):
                return
        if text:
            self._texts.append(text)
        answer.token_ids += choice.get("token_ids") or ()
        self._num_new += 1


def error_message(body: object) -> str:
    """The message of an error object, OpenAI's or another one."""
    found = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(found, Mapping):
        found = found.get("message") or found.get("detail") or json.dumps(found)
    return str(found)[:_MOST_SHOWN]
