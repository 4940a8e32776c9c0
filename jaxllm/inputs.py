"""From what a user sends to a `Request`: prompts and parameters are checked here, by any thread."""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm import tokenizer as tokenization
from jaxllm.errors import RequestError, SamplingParamsError
from jaxllm.sampling_params import MAX_BANNED_TOKEN_IDS, SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]

_MAX_PRIORITY = 2**31 - 1


class InputProcessor:
    """Makes requests; keeps nothing of them.

    Args:
        config: limits that a request must fit.
        vocab_size: token ids must be below it.
        tokenizer: turns text into tokens; None takes token ids only.
        eos_token_ids: tokens that end a sequence.
        reads: which of "priority" and "deadline" the scheduler looks at; the others are refused.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        reads: Sequence[str],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._reads = reads
        self._lock = threading.Lock()  # tokenizers encode for one thread at a time

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        arrival_time: float,
        arrival_index: int,
        priority: int | None = None,
        deadline: float | None = None,
    ) -> tuple[Request, str | None]:
        """A request, and the text of its prompt if it was given as text.

        Raises:
            RequestError, RequestTooLargeError, SamplingParamsError: see `Engine.add_request`.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r} must be a string")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}; "
                "build one with SamplingParams.from_dict(...)"
            )
        if priority is not None:
            self.check_priority(priority)
        if deadline is not None:
            self._check_read("deadline", deadline)
            is_number = isinstance(deadline, numbers.Real) and not isinstance(deadline, bool)
            if not is_number or not 0.0 < deadline < math.inf:
                raise RequestError(f"deadline={deadline!r} must be seconds from now, above 0 and finite")
        text, token_ids, cache_salt = self._tokenize(prompt)
        params.validate_for_vocab(self._vocab_size)
        num_banned = len({*(params.stop_token_ids or ()), *self._eos_token_ids})
        if params.min_tokens and num_banned > MAX_BANNED_TOKEN_IDS:
            raise SamplingParamsError(
                f"min_tokens={params.min_tokens} would keep back {num_banned} end and stop tokens; "
                f"at most {MAX_BANNED_TOKEN_IDS} are supported: drop min_tokens or some stop_token_ids"
            )
        if params.stop and self._tokenizer is None:
            raise SamplingParamsError("stop strings need a tokenizer; use stop_token_ids with this engine")
        limit = self._config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        request = Request(
            request_id,
            token_ids,
            params,
            arrival_time=arrival_time,
            arrival_index=arrival_index,
            max_total_tokens=limit,
            eos_token_ids=self._eos_token_ids,
            priority=priority or 0,
            deadline=None if deadline is None else arrival_time + deadline,
            cache_salt=cache_salt,
        )
        self._config.check_fits(request)
        return request, text

    def check_priority(self, priority: int) -> None:
        """Verify that a priority is one, and that the policy looks at it.

        Raises:
            RequestError: it is not, or does not.
        """
        self._check_read("priority", priority)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MAX_PRIORITY:
            raise RequestError(
                f"priority={priority!r} must be an integer from -{_MAX_PRIORITY} to {_MAX_PRIORITY}; "
                "lower is more urgent"
            )

    def _check_read(self, name: str, value: object) -> None:
        if name not in self._reads:
            raise RequestError(
                f"{name}={value!r} would be ignored: the scheduler policy does not look at it; choose "
                f"scheduler_policy={name!r}, or one of your own that does"
            )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Its text if it is one, its tokens, and its cache's salt if it has one."""
        cache_salt = None
        if isinstance(prompt, Mapping):
            rest = dict(prompt)
            cache_salt = rest.pop("cache_salt", None)
            keys = set(rest)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    "a prompt dictionary must have the one key 'prompt' or 'prompt_token_ids' (and may have "
                    f"'cache_salt'), not {sorted(map(str, prompt))}"
                )
            if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
                raise RequestError(
                    f"the prompt's 'cache_salt' must be text that is not empty, not {cache_salt!r}"
                )
            (key,), (prompt,) = keys, rest.values()
            if isinstance(prompt, str) != (key == "prompt"):
                expected = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"the prompt's {key!r} must be {expected}, not {type(prompt).__name__}")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("this engine has no tokenizer; pass the prompt as token ids")
            with self._lock:
                token_ids = tokenization.encode(self._tokenizer, prompt) if prompt else []
            if not token_ids:
                raise RequestError("the prompt is empty; send text, or the token ids to start from")
            return prompt, self._check_token_ids(token_ids), cache_salt
        return None, self._check_token_ids(prompt), cache_salt

    def _check_token_ids(self, prompt: Any) -> list[int]:
        is_array = hasattr(prompt, "tolist") and getattr(prompt, "ndim", None) == 1
        if not is_array and (not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray)):
            shape = f" of shape {prompt.shape}" if hasattr(prompt, "shape") else ""
            raise RequestError(
                f"a prompt must be text or a list of token ids, not {type(prompt).__name__}{shape}"
            )
        values = prompt.tolist() if is_array else list(prompt)
        if not values:
            raise RequestError("the prompt is empty; send at least one token id")
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int):
                index = getattr(value, "__index__", None)
                if index is None or isinstance(value, bool) or (hasattr(value, "tolist") and value.ndim):
                    raise RequestError(f"prompt token {value!r} at position {position} is not an integer")
                values[position] = value = index()
            if not 0 <= value < self._vocab_size:
                raise RequestError(
                    f"prompt token id {value} at position {position} is out of range; "
                    f"this model's vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        return values
