"""Outputs that a grammar bounds: vLLM's parameters, and grammars compiled by llguidance."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import SamplingParamsError, did_you_mean, shown
from jaxllm.system.json_text import parse

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMAR_LENGTH = 1_000_000
"""Longest schema, expression, grammar, or choices together, in characters."""
MAX_CHOICES = 10_000
"""Most entries of `choice`."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
NOTHING = "it allows nothing"
"""What is wrong with a grammar that no text matches, or none from where it has been followed to."""
DEFAULT_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,32}"
"""Between the tokens of JSON: a space, or a line break and what indents the next line. Models that may write
more sometimes write nothing else."""
_SPACES = r"[ \t\n\r]"
"""What JSON allows between its tokens, at most."""


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What an output must be, with vLLM's names: exactly one of the first five.

    Args:
        json: a JSON schema, as an object, as text, or True for any JSON; stored as text.
        regex: a regular expression in Rust's syntax (no look-around, no back-references), for the whole text.
        choice: strings of which the output is one.
        grammar: a context-free grammar in the Lark or GBNF dialect.
        json_object: True for any JSON object.
        disable_any_whitespace: JSON has no spaces and line breaks but those in strings.
        disable_additional_properties: objects have no properties but those that the schema names.
        whitespace_pattern: a regular expression of the space allowed between JSON's tokens, of the four
            characters that JSON takes there; `DEFAULT_WHITESPACE` if None. `[ \\t\\n\\r]+` bounds nothing.

    Raises:
        SamplingParamsError: none or several are given, or one is no such thing.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _KINDS}
        values["json_object"] = values["json_object"] or None
        given = [name for name, value in values.items() if value is not None]
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
        self._check_whitespace(given[0])

    def _check_whitespace(self, given: str) -> None:
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise SamplingParamsError(
                "structured_outputs: whitespace_pattern contradicts disable_any_whitespace=True; drop one."
            )
        of_json = "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"
        for name in of_json:
            if getattr(self, name) and given not in ("json", "json_object"):
                raise SamplingParamsError(f"structured_outputs: {name} is for json, not for {given}.")

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

    @property
    def is_harmless(self) -> bool:
        """Whether it is known, without trying, that only JSON itself nests or repeats anything in it."""
        return self.choice is not None or (self.json_object is True and self.whitespace_pattern is None)

    def grammar_text(self) -> str:
        """The grammar in llguidance's form.

        Raises:
            ValueError: it cannot be one.
        """
        import llguidance

        if self.regex is not None:
            return llguidance.LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, self.choice)))
        if self.grammar is not None:
            return llguidance.grammar_from("grammar", self.grammar)
        schema = {"type": "object"} if self.json is None else json.loads(str(self.json))
        if isinstance(schema, bool):  # which takes no options
            schema = {"anyOf": [schema]}
        if self.disable_additional_properties:
            _close_objects(schema)
        options: Any = {"whitespace_flexible": not self.disable_any_whitespace}
        if not self.disable_any_whitespace:
            pattern = self.whitespace_pattern
            options["whitespace_pattern"] = DEFAULT_WHITESPACE if pattern is None else only_spaces(pattern)
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _literal(text: str) -> str:
    """A regular expression of one text."""
    return "".join(
        one if one == " " or (one.isascii() and one.isalnum()) else f"\\x{{{ord(one):X}}}" for one in text
    )


_PARTS = re.compile(
    r"""
    (?P<group> \(\? (?: P?<\w+> | [\w-]*[:)] ) | [()|*+?^$] | \{[^}]*\} | \\[AzbB] )
  | (?P<set> \[ \^? \]? (?: \\. | \[ \^? \]? (?: \\. | [^\]\\] )* \] | [^\]\\] )* \] )
  | (?P<escape> \\ (?: [xuUpP] \{[^}]*\} | x.. | u.{4} | U.{8} | [pP]. | . ) )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def only_spaces(pattern: str) -> str:
    """A regular expression of those matches of another one that hold nothing but JSON's spaces."""

    def narrowed(part: re.Match[str]) -> str:
        if part["group"] is not None:
            return part.group()
        one = r"[^\n]" if part.group() == "." else part.group()
        if part["other"] is not None and one in "[]&~-":
            one = f"\\{one}"
        return f"[{one}&&{_SPACES}]"

    return _PARTS.sub(narrowed, pattern)


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
    """Verify that names are text; Python's encoder would make it of numbers.

    It lets other threads go on meanwhile, which reading the encoder's text again does not.
    """
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            for name in part:
                if not isinstance(name, str):
                    raise TypeError(f"the name {shown(name)} is no text")
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part


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


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens that grammars are compiled for.

    Attributes:
        tokenizer: as in a tokenizer.json.
        size: tokens that masks tell of, at least the tokenizer's.
        eos_token_ids: those that end an output.
    """

    tokenizer: str
    size: int
    eos_token_ids: Sequence[int]

    @functools.cached_property
    def tokens(self) -> LLTokenizer:
        """llguidance's form of it."""
        import llguidance

        return llguidance.LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=list(self.eos_token_ids))


def mask_width(vocab_size: int) -> int:
    """Numbers in a row of masks."""
    return -(-vocab_size // 32)


def compiled(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    """A matcher at the beginning of an output.

    Raises:
        ValueError: the grammar is invalid or too large.
    """
    import llguidance

    matcher = llguidance.LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_limits())
    if problem := problem_of(matcher):
        raise ValueError(problem)
    return matcher


def problem_of(matcher: LLMatcher) -> str | None:
    """Why a matcher cannot go on."""
    if not matcher.is_error():
        return None
    problem = matcher.get_error().replace("<non-verbose/>", "").strip() or "the grammar cannot go on"
    if problem == "NoExtensionBias":
        return NOTHING
    return f"{NOTHING}: {problem}" if "Unsatisfiable schema" in problem else problem


def _limits() -> LLParserLimits:
    """What a grammar, and each mask, may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        precompute_large_lexemes=True,  # without it memory is not bounded
        verbose_errors=False,
    )
