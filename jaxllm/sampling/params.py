"""Sampling parameters of one request, with vLLM's names and defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import SamplingParamsError, nearest
from jaxllm.sampling.param_checks import (
    MAX_BAD_WORDS,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    RequestOutputKind,
    check_boolean,
    integer_within,
    number_within,
    show,
    strings_at_most,
    to_allowed_token_ids,
    to_logit_bias,
    to_output_kind,
    to_stop_token_ids,
    to_structured_outputs,
    to_temperature,
)
from jaxllm.sampling.structured_outputs import StructuredOutputsParams
from jaxllm.system.options import Kept, json_object, option, options_of, sizes, value_checks, with_options

_NOT_SUPPORTED = "jaxllm does not support it; remove it"
_NO_BEAMS = "it belongs to beam search: use LLM.beam_search with BeamSearchParams"
_GUIDED = "use structured_outputs, of json, regex, choice or grammar (StructuredOutputsParams)"
_PROCESSORS = "give functions to the engine: LLM(logits_processors=[...])"
_FROM_TOKENIZER = "the engine reads it from the model folder; use stop_token_ids to stop at further tokens"

OTHER_NAMES: Mapping[str, str] = {
    # Hugging Face generate()
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens (output tokens, without the prompt)",
    "min_new_tokens": "use min_tokens",
    "min_length": "use min_tokens (output tokens, without the prompt)",
    "do_sample": "use temperature=0 for do_sample=False, temperature>0 for do_sample=True",
    "stop_strings": "use stop",
    "eos_token_id": f"{_FROM_TOKENIZER}, or ignore_eos=True to go on past it",
    "pad_token_id": "jaxllm pads nothing; remove it",
    "bos_token_id": "the tokenizer adds it; remove it, or send token ids",
    "num_return_sequences": "use n",
    "num_beams": _NO_BEAMS,
    "num_beam_groups": _NO_BEAMS,
    "diversity_penalty": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "no_repeat_ngram_size": "it is unsupported; use repetition_penalty or frequency_penalty",
    "encoder_repetition_penalty": "it is unsupported; use repetition_penalty",
    "bad_words_ids": "use bad_words, strings",
    "force_words_ids": _NOT_SUPPORTED,
    "suppress_tokens": "use allowed_token_ids, or logit_bias with -100 for each token",
    "begin_suppress_tokens": _NOT_SUPPORTED,
    "sequence_bias": "use logit_bias for single tokens; longer sequences are unsupported",
    "penalty_alpha": "it is unsupported (contrastive search); use top_p or min_p",
    "typical_p": "it is unsupported; use top_p or min_p",
    "epsilon_cutoff": "it is unsupported; use min_p",
    "eta_cutoff": "it is unsupported; use min_p",
    "top_h": "it is unsupported; use top_p or min_p",
    "guidance_scale": _NOT_SUPPORTED,
    "renormalize_logits": _NOT_SUPPORTED,
    "logits_processor": _PROCESSORS,
    "stopping_criteria": "use stop or stop_token_ids",
    "use_cache": "the KV cache is always on; remove it",
    "generation_config": "pass its values as separate keywords",
    "streamer": "use LLM.stream",
    # vLLM and OpenAI
    "use_beam_search": _NO_BEAMS,
    "beam_width": _NO_BEAMS,
    "guided_decoding": _GUIDED,
    "response_format": _GUIDED,
    "logits_processors": _PROCESSORS,
    "spaces_between_special_tokens": _NOT_SUPPORTED,
    "extra_args": _NOT_SUPPORTED,
    "repetition_detection": "it is unsupported; use repetition_penalty, or stop",
    "thinking_token_budget": _NOT_SUPPORTED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "flat_logprobs": _NOT_SUPPORTED,
    "max_completion_tokens": "use max_tokens",
    "top_logprobs": "use logprobs (a number)",
    # llama.cpp, SGLang, TensorRT-LLM
    "repeat_penalty": "use repetition_penalty",
    "n_predict": "use max_tokens",
    "random_seed": "use seed",
    "sampling_seed": "use seed",
    "temp": "use temperature",
    "end_id": _FROM_TOKENIZER,
}
"""Names that other libraries use, each with the way out."""

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "extra_args": (None,),
    "flat_logprobs": (None, False),
    "guided_decoding": (None,),
    "logits_processors": (None,),
    "spaces_between_special_tokens": (None, True),
}
"""vLLM's parameters that there are not, and values that change nothing; so does an empty list or mapping."""


@with_options
class SamplingParams:
    """How to sample one request's tokens. Immutable, hashable and picklable.

    Every value is checked and normalised: numpy scalars become Python numbers, lists become tuples,
    and an absent list is an empty tuple. `dataclasses.replace` makes a changed copy.

    Order of application to the logits: allowed tokens, bad words and structured outputs, logit bias,
    penalties, min_tokens, temperature, min-p, top-k, top-p.

    Args:
        temperature: 0 is greedy; else 0.01..100, and what lies between becomes 0.01, as in vLLM.
        top_k: Sample among the k most likely tokens, 1..2**31-1; 0 or -1 is off (stored as 0). What ties with
            the k-th of them is kept, too.
        top_p: Keep the smallest set of most likely tokens of at least this probability, in (0, 1]. What ties
            with the least likely of them is kept, too.
        min_p: Drop tokens less likely than this share of the most likely one, 0..1.
        presence_penalty: Subtracted once from each token the output holds, -2..2.
        frequency_penalty: Subtracted per occurrence in the output, -2..2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or the
            output, in (0, 100]; 1 is off.
        logit_bias: Token id -> addend in -100..100, at most 300 entries. Keys may be numeric strings. Stored
            as a tuple of `(token_id, bias)` pairs in order of token id.
        seed: Makes the request's samples reproducible, `-2**63..2**64-1`; None or -1 is unseeded.
        max_tokens: Most output tokens, 1..2**31-1. None is up to the model's length.
        min_tokens: No end-of-sequence or stop token before this many output tokens, 0..max_tokens.
        stop: At most 64 strings of 1..1000 characters that end the output; special tokens that they name
            count whether the text shows them or not.
        stop_token_ids: At most 128 token ids that end the output, each 0..2**31-1.
        include_stop_str_in_output: Keep the stop string in the text.
        ignore_eos: Go on past the end-of-sequence token.
        logprobs: Return this many top log-probabilities per output token, 0..20, and the chosen token's; -1
            returns those of all tokens. None is none.
        prompt_logprobs: The same for the prompt's tokens, without -1.
        detokenize: Return text. Stop strings need it.
        skip_special_tokens: Leave special tokens out of the text.
        n: Samples of the prompt, 1..16384, which share its KV blocks; sample i has the seed `seed + i`. More
            than one need a temperature above 0.
        best_of: Samples that are drawn, n..16384, of which the n of the largest `cumulative_logprob` are
            returned, the largest first; None is n.
        allowed_token_ids: No others are sampled; at most 2**20, of which there is one at least. None allows
            all.
        bad_words: At most 1000 strings, of 50,000 characters together, that the output does not contain,
            found token by token as vLLM does: as they are spelled at the beginning of a text and after a
            space. A word of the only token that is allowed does not count.
        structured_outputs: What the output is if it ends by "stop": an object of regex, json (a schema),
            choice, grammar or json_object. A mapping of names and values, or `StructuredOutputsParams`.
        truncate_prompt_tokens: Use only so many of the prompt's last tokens, 1..2**31-1; -1 as many as the
            model's length leaves room for.
        output_kind: What outputs hold while a request streams; `generate` returns the final ones only.

    Raises:
        SamplingParamsError: an unknown name, a wrong type or a value out of range.
    """

    temperature: float = option(1.0, check=to_temperature)
    top_k: int = option(0, check=integer_within(0, MAX_INT32, "0 or -1 is off", minus_one=0))
    top_p: float = option(1.0, check=number_within(0, 1, "1 is off", above_low=True))
    min_p: float = option(0.0, check=number_within(0, 1, "0 is off"))
    presence_penalty: float = option(0.0, check=number_within(-2, 2, "0 is off"))
    frequency_penalty: float = option(0.0, check=number_within(-2, 2, "0 is off"))
    repetition_penalty: float = option(1.0, check=number_within(0, 100, "1 is off", above_low=True))
    logit_bias: Kept[
        tuple[tuple[int, float], ...],
        Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None,
    ] = option((), check=to_logit_bias, parse=json_object)
    seed: int | None = option(
        None, check=integer_within(-(2**63), 2**64 - 1, "None is unseeded", minus_one=None), flag=None
    )
    max_tokens: int | None = option(
        16, check=integer_within(1, MAX_INT32, "None is up to the model's length")
    )
    min_tokens: int = option(0, check=integer_within(0, MAX_INT32))
    stop: Kept[tuple[str, ...], str | Sequence[str] | None] = option(
        (), check=strings_at_most(MAX_STOP_STRINGS), is_repeated=True
    )
    stop_token_ids: Kept[tuple[int, ...], Sequence[int] | None] = option(
        (), check=to_stop_token_ids, parse=sizes
    )
    include_stop_str_in_output: bool = option(False, check=check_boolean)
    ignore_eos: bool = option(False, check=check_boolean)
    logprobs: int | None = option(None, check=integer_within(-1, MAX_LOGPROBS, "None is off, -1 is all"))
    prompt_logprobs: int | None = option(None, check=integer_within(0, MAX_LOGPROBS, "None is off"))
    detokenize: bool = option(True, check=check_boolean, flag=None)
    skip_special_tokens: bool = option(True, check=check_boolean)
    n: int = option(1, check=integer_within(1, MAX_SAMPLES))
    best_of: int | None = option(None, check=integer_within(1, MAX_SAMPLES, "None is n"))
    allowed_token_ids: Kept[tuple[int, ...], Sequence[int] | None] = option(
        (), check=to_allowed_token_ids, parse=sizes
    )
    bad_words: Kept[tuple[str, ...], Sequence[str] | None] = option(
        (), check=strings_at_most(MAX_BAD_WORDS), flag="bad_word", is_repeated=True
    )
    structured_outputs: Kept[
        StructuredOutputsParams | None, StructuredOutputsParams | Mapping[str, Any] | None
    ] = option(None, check=to_structured_outputs, parse=json_object)
    truncate_prompt_tokens: int | None = option(
        None, check=integer_within(1, MAX_INT32, "-1 is what the model takes", minus_one=-1)
    )
    output_kind: Kept[RequestOutputKind, RequestOutputKind | str] = option(
        RequestOutputKind.CUMULATIVE, check=to_output_kind, flag=None
    )

    if not TYPE_CHECKING:  # type checkers take what callers may pass from the fields

        def __init__(self, /, **values: object) -> None:
            chosen = _DEFAULTS.copy()
            for name, value in values.items():
                if name in chosen:
                    if value is not chosen[name]:
                        chosen[name] = _CHECKS[name](name, value)
                elif not _changes_nothing(name, value):
                    raise SamplingParamsError(_describe_unknown(name))
            self.__dict__.update(chosen)
            self._check_together()

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}: "
                "lower min_tokens or raise max_tokens."
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                f"stop={list(self.stop)!r} needs detokenize=True: stop strings are found in the text. "
                "Set detokenize=True, or use stop_token_ids."
            )

        if self.structured_outputs is not None:
            for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):
                if value := getattr(self, name):
                    raise SamplingParamsError(
                        f"{name}={show(value)} contradicts structured_outputs, which alone say what may "
                        "come next: drop one of them."
                    )
        if self.num_samples < self.n:
            raise SamplingParamsError(
                f"best_of={self.best_of} is below n={self.n}: raise best_of or lower n."
            )
        if self.num_samples > 1 and self.is_greedy:
            name = "n" if self.n > 1 else "best_of"
            raise SamplingParamsError(
                f"{name}={self.num_samples} with temperature=0 would give the same output as often: raise "
                f"temperature, or leave {name} out."
            )

    @property
    def num_samples(self) -> int:
        """Samples that are drawn of a prompt."""
        return self.n if self.best_of is None else self.best_of

    def sample(self, index: int) -> SamplingParams:
        """Those of one of the samples, from 0 on."""
        seed = self.seed
        if seed is not None and (seed := seed + index) >= 2**64:
            seed -= 2**64
        is_ranked = self.num_samples > self.n
        return dataclasses.replace(
            self,
            n=1,
            best_of=None,
            seed=seed,
            logprobs=0 if is_ranked and self.logprobs is None else self.logprobs,
            prompt_logprobs=None if index else self.prompt_logprobs,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from a mapping of names to values, such as a row of a JSONL file.

        Raises:
            SamplingParamsError: `values` is no mapping, or as for the constructor.
        """
        if not isinstance(values, Mapping):
            raise SamplingParamsError(
                f"sampling parameters must be an object of names and values, not {show(values)}."
            )
        for name in values:
            if not isinstance(name, str):
                raise SamplingParamsError(f"sampling parameter names must be strings, not {show(name)}.")
        return cls(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """As the constructor, where None stands for a parameter's default, as in vLLM."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """An equal one; parameters never change, so that it need not be another."""
        return self

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Checks every token id against the model's vocabulary.

        Raises:
            SamplingParamsError: one is not below `vocab_size`.
        """
        for name, ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise SamplingParamsError(
                        f"{name}: token id {token_id} is outside the model's vocabulary: "
                        f"it must be in 0..{vocab_size - 1}. Remove it, or use this model's tokenizer."
                    )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        """Whether a presence, frequency or repetition penalty is on."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of output tokens are asked for (`prompt_logprobs` is apart)."""
        return self.logprobs is not None


_DEFAULTS = {name: default for name, default, _ in options_of(SamplingParams)}
_CHECKS = value_checks(SamplingParams)
PARAMETER_NAMES = tuple(_DEFAULTS)
"""Every sampling parameter, in the order of the class."""


def _changes_nothing(name: str, value: object) -> bool:
    if name not in NEUTRAL_VALUES:
        return False
    is_empty = isinstance(value, list | tuple | dict) and not value
    return is_empty or any(value is one for one in NEUTRAL_VALUES[name])


def _describe_unknown(name: str) -> str:
    if name in OTHER_NAMES:
        return f"{name} is not a sampling parameter of jaxllm: {OTHER_NAMES[name]}."
    near = nearest(name, PARAMETER_NAMES)
    hint = f"did you mean {near}?" if near else f"choose from {', '.join(PARAMETER_NAMES)}."
    return f"{name} is not a sampling parameter of jaxllm: {hint}"
