"""Outputs that a grammar bounds: vLLM's parameters, and grammars compiled by llguidance."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from jaxllm.errors import SamplingParamsError, did_you_mean, shown
from jaxllm.json_text import parse

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_GRAMMAR_LENGTH = 1_000_000
"""Longest schema, expression, grammar, or choices together, in characters."""
MAX_CHOICES = 10_000
"""Most entries of `choice`."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_NUM_CACHED = 256


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must be, with vLLM's names: exactly one of the first five.

    Args:
        json: a JSON schema, as an object or as text; stored as text.
        regex: a regular expression in Rust's syntax (no look-around, no back-references), for the whole text.
        choice: strings of which the output is one.
        grammar: a context-free grammar in the Lark or GBNF dialect.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON has no spaces and line breaks but those in strings.
        disable_additional_properties: objects have no properties but those that the schema names.
        whitespace_pattern: a regular expression of the space allowed in JSON.

    Raises:
        SamplingParamsError: none or several are given, or one is no such thing.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) if given else "nothing"
            raise SamplingParamsError(
                f"structured_outputs holds {names}: give exactly one of {', '.join(_KINDS)}."
            )
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise SamplingParamsError(f"structured_outputs: {name} must be True or False.")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                _check_text(name, value)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise SamplingParamsError(
                "structured_outputs: whitespace_pattern contradicts disable_any_whitespace=True; drop one."
            )
        of_json = "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"
        for name in of_json:
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise SamplingParamsError(f"structured_outputs: {name} is for json, not for {given[0]}.")

    @classmethod
    def of(cls, value: object) -> StructuredOutputsParams | None:
        """From parameters, or from a mapping of their names and values; None stays None.

        Raises:
            SamplingParamsError: it is neither, or holds an unknown name.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise SamplingParamsError(
                f"structured_outputs must be a StructuredOutputsParams or an object, not "
                f"{type(value).__name__}."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                raise SamplingParamsError(
                    f"structured_outputs has no {shown(name)}; {did_you_mean(name, known)}it takes "
                    f"{', '.join(known)}."
                )
        return cls(**value)

    def grammar_text(self) -> str:
        """The grammar in llguidance's form.

        Raises:
            ValueError: it cannot be one.
        """
        import llguidance

        if self.regex is not None:
            return llguidance.LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            lark = " | ".join(json.dumps(one, ensure_ascii=False) for one in self.choice)
            return llguidance.LLMatcher.grammar_from_lark(f"start: {lark}")
        if self.grammar is not None:
            return llguidance.grammar_from("grammar", self.grammar)
        schema = {"type": "object"} if self.json is None else json.loads(str(self.json))
        if self.disable_additional_properties:
            _close_objects(schema)
        options: Any = {"whitespace_flexible": not self.disable_any_whitespace}
        if self.whitespace_pattern is not None:
            options["whitespace_pattern"] = self.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise SamplingParamsError(f"structured_outputs: {name} must be text that is not empty.")
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise SamplingParamsError(
            f"structured_outputs: {name} has {len(value)} characters: at most {MAX_GRAMMAR_LENGTH} are "
            "allowed."
        )


def _schema(value: object) -> str:
    """A JSON schema as text."""
    if isinstance(value, str):
        _check_text("json", value)
        try:
            value = parse(value)
        except ValueError as error:
            raise SamplingParamsError(f"structured_outputs: json is no JSON: {error}.") from None
    if not isinstance(value, Mapping | bool):
        raise SamplingParamsError(
            f"structured_outputs: json must be a schema, an object, not {type(value).__name__}."
        )
    try:
        text = json.dumps(value, allow_nan=False)
        _check_keys(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(f"structured_outputs: json is no JSON schema: {error}.") from None
    return text


def _check_keys(value: object) -> None:
    """Verify that names are text; Python's encoder would make it of numbers."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"the name {shown(name)} is no text")
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            _check_keys(one)


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SamplingParamsError("structured_outputs: choice must be a list of strings.")
    choices: list[str] = []
    for one in value:
        if not isinstance(one, str) or not one:
            raise SamplingParamsError("structured_outputs: choice must hold strings that are not empty.")
        choices.append(one)
        if len(choices) > MAX_CHOICES:
            raise SamplingParamsError(
                f"structured_outputs: choice holds too many entries: at most {MAX_CHOICES} are allowed."
            )
    if not choices:
        raise SamplingParamsError("structured_outputs: choice is empty; leave it out, or name strings.")
    return tuple(dict.fromkeys(choices))


def _close_objects(schema: Any) -> None:
    """Allow no further properties wherever a schema names some and does not say."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            if "additionalProperties" not in part and ("properties" in part or "patternProperties" in part):
                part["additionalProperties"] = False
            stack += part.values()
        elif isinstance(part, list):
            stack += part


class Grammars:
    """Compiles grammars for one tokenizer, in the thread that asks, and keeps the latest ones.

    llguidance bounds what it compiles and what a token may take, so that neither takes long.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: the model's.
        eos_token_ids: tokens that end an output, of which there is at least one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Set[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: collections.OrderedDict[StructuredOutputsParams, LLMatcher] = (
            collections.OrderedDict()
        )

    def matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the beginning of an output.

        Raises:
            SamplingParamsError: the grammar is invalid or too large, or the tokenizer cannot be used.
        """
        with self._lock:
            compiled = self._compiled.get(params)
            if compiled is None:
                compiled = self._compile(params)
                self._compiled[params] = compiled
                if len(self._compiled) > _NUM_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(params)
            return compiled.deep_copy()

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, params.grammar_text(), log_level=0)
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise SamplingParamsError(f"structured_outputs cannot be compiled: {problem.strip()}")
        return matcher

    def _make_vocabulary(self) -> LLTokenizer:
        import llguidance.hf
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise SamplingParamsError(
                "structured_outputs needs a tokenizer with a tokenizer.json: "
                f"{'none was loaded' if self._tokenizer is None else type(self._tokenizer).__name__}"
            )
        if not self._eos_token_ids:
            raise SamplingParamsError(
                "structured_outputs needs an end-of-sequence token, and the model's config.json has none: "
                "set eos_token_id there"
            )
        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
        )
