"""What a request returns, with vLLM's names. Imports no accelerator library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.types import FinishReason, RequestMetrics


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural logarithm) at one position.

    `rank` counts from 1, the most likely token. `decoded_token` is what it adds to the text, nothing if
    it is a part of a character that is not whole yet; None without detokenizing.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id to its log-probability: the chosen token, and then the top ones, of which it may be one."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    `logprobs` has one entry per token id, `cumulative_logprob` is the sum over the chosen tokens; both
    are None unless asked for. `finish_reason` is None while the request runs, else "stop" (an
    end-of-sequence token, a stop token or a stop string), "length", "abort" or "error". `stop_reason` is the
    stop string or stop token id that ended it, or what was wrong (a grammar that cannot go on, logits that
    are no finite numbers); None for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's prompt and completions so far.

    `prompt` is None for a prompt given as token ids alone. `prompt_logprobs` has one entry per prompt token,
    the first of them None since nothing precedes it; it is None unless asked for. Of several outputs
    for one request, each holds everything so far. `num_cached_tokens` is how many of the prompt's tokens were
    not computed, since their KV was found when the request first started, and `cached_tokens_by_tier` where:
    on the "device", in "host" memory (`num_host_cached_tokens`), or on "disk" (`num_disk_cached_tokens`). The
    first `num_dropped_tokens` of the prompt were cut: neither attended to, nor found, nor computed.

    `text`, `token_ids` and the like are those of the first completion: `output.text` is
    `output.outputs[0].text`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_disk_cached_tokens: int = 0
    num_dropped_tokens: int = 0

    @classmethod
    def refused(cls, request_id: str, error: Exception) -> RequestOutput:
        """Of a request that was not queued: it ended by an error, which `stop_reason` tells."""
        nothing = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
        return cls(request_id, None, [], None, [nothing], finished=True)

    @property
    def cached_tokens_by_tier(self) -> dict[str, int]:
        """See the class."""
        num_on_host, num_on_disk = self.num_host_cached_tokens, self.num_disk_cached_tokens
        num_on_device = self.num_cached_tokens - num_on_host - num_on_disk
        return {"device": num_on_device, "host": num_on_host, "disk": num_on_disk}

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        """Log-probabilities of the first completion."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Summed log-probability of the first completion."""
        return self.outputs[0].cumulative_logprob

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended; None while it runs."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Stop string or stop token id that ended the first completion."""
        return self.outputs[0].stop_reason

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values.

        JSON's rules apply: token ids that are keys become strings, tuples lists, and a log-probability
        of minus infinity (a token that a filter removed) null.
        """
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "prompt_logprobs": positions_to_dicts(self.prompt_logprobs),
            "outputs": [
                {
                    "index": output.index,
                    "text": output.text,
                    "token_ids": list(output.token_ids),
                    "cumulative_logprob": _finite(output.cumulative_logprob),
                    "logprobs": positions_to_dicts(output.logprobs),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for output in self.outputs
            ],
            "finished": self.finished,
            "metrics": None if self.metrics is None else dataclasses.asdict(self.metrics),
            "num_cached_tokens": self.num_cached_tokens,
            "num_host_cached_tokens": self.num_host_cached_tokens,
            "num_disk_cached_tokens": self.num_disk_cached_tokens,
            "num_dropped_tokens": self.num_dropped_tokens,
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def positions_to_dicts(
    positions: Sequence[PositionLogprobs | None] | None,
    number: Callable[[float], float | None] = _finite,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """JSON-ready log-probabilities, by token id as text; the first token of a prompt has none.

    Args:
        positions: of each token.
        number: what stands for a log-probability.
    """
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": number(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]
