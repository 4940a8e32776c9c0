"""From what a user sends to a `Request`: prompts and parameters are checked here, by any thread."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from jaxllm.errors import RequestError, RequestTooLargeError, SamplingParamsError, shown
from jaxllm.sampling.param_checks import MAX_BANNED_TOKEN_IDS
from jaxllm.sampling.params import SamplingParams
from jaxllm.sampling.token_masks import TokenMasks
from jaxllm.sched.cache.lookups import learn_names
from jaxllm.sched.config import SchedulerConfig
from jaxllm.text import tokenizer as tokenization
from jaxllm.types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = str | Mapping[str, Any] | Sequence[Prompt] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Priorities = int | Sequence[int] | None
Deadlines = float | Sequence[float] | None


class TextPrompt(TypedDict):
    """A prompt as text; keys as in `Engine.add_request`."""

    prompt: str
    cache_salt: NotRequired[str]
    num_dropped_tokens: NotRequired[int]


class TokensPrompt(TypedDict):
    """A prompt as token ids, and the text they are of, which the output repeats; likewise."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    num_dropped_tokens: NotRequired[int]


_OPTIONS = ("cache_salt", "num_dropped_tokens")
_MAX_TOKENS = 2**24
_MAX_PROMPTS = 2**24
_MAX_SECONDS = 1e12
_MAX_PRIORITY = 2**31 - 1
_MAX_DROPPED_TOKENS = 2**18
"""Beyond this position float32 is too coarse for the angles that keys and queries are turned by."""


class InputProcessor:
    """Makes requests; keeps nothing of them.

    Args:
        config: limits that a request must fit.
        vocab_size: token ids must be below it.
        tokenizer: turns text into tokens; None takes token ids only.
        eos_token_ids: tokens that end a sequence.
        reads: which of "priority" and "deadline" the scheduler looks at; the others are refused.
        has_rotary_positions: whether attention depends on the difference of positions alone, so that prompts
            may be cut at their front.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        reads: Sequence[str],
        has_rotary_positions: bool,
    ) -> None:
        self._config = config
        self._has_rotary_positions = has_rotary_positions
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._reads = reads
        self._masks = TokenMasks(tokenizer, vocab_size, eos_token_ids)

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        arrival_time: float,
        arrivals: Iterator[int],
        priority: int | None = None,
        deadline: float | None = None,
    ) -> tuple[list[Request], str | None]:
        """A request for each sample of a prompt, and the prompt's text if it was given as text.

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
        self._check_urgency(priority, deadline, arrival_time)
        text, token_ids, options = self._tokenize(prompt)
        num_dropped = options["num_dropped_tokens"] or 0
        token_ids = list(self.truncated(token_ids, params, num_dropped))
        self.check_dropped(num_dropped, len(token_ids), params)
        self.check_params(params)
        limit = self._config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) - num_dropped + params.max_tokens)
        samples = {request_id: params}
        if params.num_samples > 1:
            samples = {f"{i}_{request_id}": params.sample(i) for i in range(params.num_samples)}
        indices = [next(arrivals) for _ in samples]
        requests = [
            Request(
                sample_id,
                token_ids[num_dropped:],
                of_sample,
                arrival_time=float(arrival_time),
                arrival_index=index,
                group_index=indices[0],
                token_mask=self._masks.make(of_sample),
                max_total_tokens=limit,
                eos_token_ids=self._eos_token_ids,
                priority=priority or 0,
                deadline=None if deadline is None else arrival_time + float(deadline),
                cache_salt=options["cache_salt"],
                dropped_token_ids=token_ids[:num_dropped],
            )
            for index, (sample_id, of_sample) in zip(indices, samples.items(), strict=True)
        ]
        self._config.check_fits(requests[0])
        if self._config.enable_prefix_caching:  # here, so that no iteration waits for it
            learn_names(requests[0], len(token_ids), self._config.block_size)
            for request in requests[1:]:
                request.block_names, request.uncut_names = (
                    list(names) for names in (requests[0].block_names, requests[0].uncut_names)
                )
        return requests, text

    def _check_urgency(self, priority: int | None, deadline: float | None, arrival_time: float) -> None:
        if priority is not None:
            self.check_priority(priority)
        if deadline is not None:
            self._check_read("deadline", deadline)
            if not _is_time(deadline) or deadline <= 0:
                raise RequestError(f"deadline={shown(deadline)} must be seconds from now, above 0 and finite")
        if not _is_time(arrival_time):
            raise RequestError(
                f"arrival_time={shown(arrival_time)} must be a finite number, seconds of the engine's clock; "
                "leave it out for now"
            )

    def check_params(self, params: SamplingParams) -> None:
        """Verify that the model and the tokenizer can do what is asked for.

        Raises:
            SamplingParamsError: they cannot.
        """
        params.validate_for_vocab(self._vocab_size)
        num_banned = len({*(params.stop_token_ids or ()), *self._eos_token_ids})
        if params.min_tokens and num_banned > MAX_BANNED_TOKEN_IDS:
            raise SamplingParamsError(
                f"min_tokens={params.min_tokens} would keep back {num_banned} end and stop tokens; "
                f"at most {MAX_BANNED_TOKEN_IDS} are supported: drop min_tokens or some stop_token_ids"
            )
        if params.stop and self._tokenizer is None:
            raise SamplingParamsError("stop strings need a tokenizer; use stop_token_ids with this engine")
        self._masks.make(params)

    def clear(self) -> None:
        """Let go of grammars and the like, which are kept for later requests."""
        self._masks.clear()

    def takes_long(self, params: SamplingParams) -> bool:
        """Whether such a request may take seconds to make, for a grammar that is not known."""
        return self._masks.takes_long(params)

    def truncated(self, token_ids: Sequence[int], params: SamplingParams, num_dropped: int) -> Sequence[int]:
        """The last tokens of a prompt, as many as its parameters say.

        Raises:
            RequestError: its front is cut in the other way as well.
        """
        length = params.truncate_prompt_tokens
        if length is None:
            return token_ids
        if num_dropped:
            raise RequestError(
                f"truncate_prompt_tokens={length} and num_dropped_tokens={num_dropped} both cut the prompt: "
                "leave one of them out"
            )
        if length == -1:
            length = max(1, self._config.max_model_len - (params.max_tokens or 1))
        return token_ids[-length:]

    def check_priority(self, priority: int) -> None:
        """Verify that a priority is one, and that the policy looks at it.

        Raises:
            RequestError: it is not, or does not.
        """
        if type(priority) is not int or priority:  # 0 is what all have
            self._check_read("priority", priority)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > _MAX_PRIORITY:
            raise RequestError(
                f"priority={shown(priority)} must be an integer from -{_MAX_PRIORITY} to {_MAX_PRIORITY}; "
                "lower is more urgent"
            )

    def check_dropped(self, num_dropped: int, num_tokens: int, params: SamplingParams) -> None:
        """Verify that so many of a prompt's `num_tokens` tokens can be cut at its front.

        Raises:
            RequestError: they cannot.
            SamplingParamsError: not with these parameters.
        """
        if isinstance(num_dropped, bool) or not isinstance(num_dropped, numbers.Integral):
            raise RequestError(
                f"num_dropped_tokens={shown(num_dropped)} must be an integer: how many tokens at the "
                "prompt's front are cut"
            )
        if not num_dropped:
            return
        what, size = f"num_dropped_tokens={num_dropped}", self._config.block_size
        if not self._has_rotary_positions:
            raise RequestError(
                f"{what} needs rotary positions, as Llama's; those of this model (OPT's are learned) cannot "
                "be kept where its front is gone: send the shortened prompt itself"
            )
        if num_dropped < 0 or num_dropped % size:
            below = max(0, num_dropped // size * size)
            nearest = f"{below} or {below + size}" if num_dropped > 0 else "0"
            raise RequestError(
                f"{what} must be 0 or a multiple of the engine's block size, {size}: take {nearest}"
            )
        if num_dropped >= num_tokens:
            raise RequestError(
                f"{what} leaves nothing of a prompt of {num_tokens} tokens; at least one must stay"
            )
        if num_dropped > _MAX_DROPPED_TOKENS:
            raise RequestError(
                f"{what} is more than {_MAX_DROPPED_TOKENS}, beyond which float32 is too coarse for rotary "
                "angles: send the shortened prompt itself, with none dropped"
            )
        if params.prompt_logprobs is not None:
            raise SamplingParamsError(
                f"prompt_logprobs={params.prompt_logprobs} computes a whole prompt, and {what} keeps the KV "
                "of what is left: leave one of them out, or send the shortened prompt itself"
            )

    def _check_read(self, name: str, value: object) -> None:
        if name not in self._reads:
            raise RequestError(
                f"{name}={shown(value)} would be ignored: the scheduler policy does not look at it; choose "
                f"scheduler_policy={name!r}, or one of your own that does"
            )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], dict[str, Any]]:
        """Its text if it is one, its tokens, and what else it has of `_OPTIONS`."""
        options: dict[str, Any] = dict.fromkeys(_OPTIONS)
        if isinstance(prompt, Mapping):
            rest = dict(prompt)
            options = {name: rest.pop(name, None) for name in _OPTIONS}
            cache_salt = options["cache_salt"]
            keys = set(rest)
            if not keys or not keys <= {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    "a prompt dictionary must have 'prompt' or 'prompt_token_ids' (and may have 'cache_salt' "
                    f"and 'num_dropped_tokens'), not {sorted(map(str, prompt))}"
                )
            if cache_salt is not None and not _is_salt(cache_salt):
                raise RequestError(
                    f"the prompt's 'cache_salt' must be text that is not empty and that UTF-8 can "
                    f"encode, not {cache_salt!r}"
                )
            for key, value in rest.items():
                if isinstance(value, str) != (key == "prompt"):
                    expected = "text" if key == "prompt" else "a list of token ids"
                    raise RequestError(f"the prompt's {key!r} must be {expected}, not {type(value).__name__}")
            if "prompt_token_ids" in rest:
                return rest.get("prompt"), self._check_token_ids(rest["prompt_token_ids"]), options
            prompt = rest["prompt"]
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("this engine has no tokenizer; pass the prompt as token ids")
            token_ids = tokenization.encode(self._tokenizer, prompt)
            if not token_ids:
                raise RequestError(
                    "the prompt is empty, and this tokenizer adds no token of its own; send text, or the "
                    "token ids to start from"
                )
            return prompt, self._check_token_ids(token_ids), options
        return None, self._check_token_ids(prompt), options

    def _check_token_ids(self, prompt: Any) -> list[int]:
        is_array = hasattr(prompt, "tolist") and getattr(prompt, "ndim", None) == 1
        if not is_array and (not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray)):
            shape = f" of shape {prompt.shape}" if hasattr(prompt, "shape") else ""
            raise RequestError(
                f"a prompt must be text or a list of token ids, not {type(prompt).__name__}{shape}"
            )
        if len(prompt) > _MAX_TOKENS:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens is longer than any model takes, {_MAX_TOKENS}: shorten it"
            )
        values = prompt.tolist() if is_array else list(prompt)
        if not values:
            raise RequestError("the prompt is empty; send at least one token id")
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int):
                index = getattr(value, "__index__", None)
                if index is None or isinstance(value, bool) or (hasattr(value, "tolist") and value.ndim):
                    raise RequestError(
                        f"prompt token {shown(value)} at position {position} is not an integer"
                    )
                values[position] = value = index()
            if not 0 <= value < self._vocab_size:
                raise RequestError(
                    f"prompt token id {shown(value)} at position {position} is out of range; "
                    f"this model's vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        return values


def _is_time(value: object) -> bool:
    """Whether it is a number of seconds that clocks can tell apart from others."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and -_MAX_SECONDS < value < _MAX_SECONDS  # type: ignore[operator]


def _is_salt(value: object) -> bool:
    """Whether it is text that is not empty, and that UTF-8 has bytes for."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def as_prompts(prompts: Prompts) -> list[Any]:
    """One prompt after another, also where one alone is given.

    Raises:
        RequestError: they are no list of prompts.
    """
    refuse_table(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise RequestError(f"prompts must be one prompt or a list of them, not {shown(prompts)}")
    if isinstance(prompts, bytes | bytearray | Set):
        raise RequestError(f"prompts must be a list, not {type(prompts).__name__}: their order matters")
    items = list(itertools.islice(prompts, _MAX_PROMPTS + 1))
    if len(items) > _MAX_PROMPTS:
        raise RequestError(f"prompts has more than {_MAX_PROMPTS} entries: give fewer at once")
    is_one = bool(items) and all(
        hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0 for item in items
    )
    return [items] if is_one else items


def refuse_table(prompts: Any) -> None:
    """Refuse what has columns: going through it gives their names, or the columns."""
    if isinstance(prompts, Mapping):
        column = prompts.get("prompt", "")
        if isinstance(column, str) or not isinstance(column, Iterable):
            return
        if not isinstance(next(iter(column), ""), str):  # a prompt that is no text
            return
        way_out = 'list(columns["prompt"])'
    elif hasattr(prompts, "to_pylist"):  # pyarrow
        way_out = "to_pylist()" if not hasattr(prompts, "columns") else 'table["prompt"].to_pylist()'
    elif not hasattr(prompts, "columns"):
        return
    else:
        way_out = 'df["prompt"].to_list()' if hasattr(prompts, "get_column") else 'df["prompt"].tolist()'
    raise RequestError(
        f"prompts is a table, of type {type(prompts).__name__}, and must be a list: give the column that "
        f"holds the prompts, such as {way_out}"
    )


def as_requests(
    call: int, prompts: Prompts, params: Params, priorities: Priorities, deadlines: Deadlines
) -> list[tuple[str, dict[str, Any]]]:
    """Ids of a call's requests, as messages name them, and their arguments of `Engine.prepare`."""
    items = as_prompts(prompts)
    columns = {
        "prompt": items,
        "sampling_params": _one_each("sampling_params", params, len(items)),
        "priority": _one_each("priority", priorities, len(items)),
        "deadline": _one_each("deadline", deadlines, len(items)),
    }
    return [
        (f"prompts[{place}]/{call}", dict(zip(columns, row, strict=True)))
        for place, row in enumerate(zip(*columns.values(), strict=True))
    ]


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """What is given for each of `count` prompts."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts; pass one for all or one for each")
    return list(values)
