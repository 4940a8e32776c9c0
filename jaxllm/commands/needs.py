"""Options that do nothing without others, or with others: given so they are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxllm.errors import ConfigError

_DECLARED = "rules_of_options"


class _Rule(NamedTuple):
    """An option, what it is if it is not given, and others of which it needs one, or cannot have any."""

    option: argparse.Action
    default: Any
    others: Sequence[argparse.Action]
    is_need: bool


def only_with(parser: argparse.ArgumentParser, *others: str, options: Iterable[str]) -> None:
    """Say that each of the options does nothing unless one of others is given."""
    _declare(parser, others, options, is_need=True)


def not_with(parser: argparse.ArgumentParser, other: str, options: Iterable[str]) -> None:
    """Say that each of the options does nothing where another is given."""
    _declare(parser, [other], options, is_need=False)


def alone(parser: argparse.ArgumentParser, option: str, *, but: Iterable[str]) -> None:
    """Say that where an option is given no others do anything, but for some."""
    not_with(parser, option, {action.dest for action in parser._actions}.difference({option, *but}))


def check_needs(args: argparse.Namespace) -> None:
    """Verify that all options that were given may do something.

    Raises:
        ConfigError: one needs another, which was not given, or is of no use with one that was.
    """
    rules: Sequence[_Rule] = getattr(args, _DECLARED, ())
    for option, default, others, is_need in rules:
        value = getattr(args, option.dest, default)
        if value == default:
            continue
        given = [_called(other) for other in others if getattr(args, other.dest, None)]
        said = _called(option, is_off=value is False)
        if is_need and not given:
            raise ConfigError(
                f"{said} does nothing without {' or '.join(map(_called, others))}: add "
                f"{'that' if len(others) == 1 else 'one of them'}, or leave {said} out"
            )
        if given and not is_need:
            raise ConfigError(f"{said} means nothing with {given[0]}; leave it out")


def _declare(
    parser: argparse.ArgumentParser, others: Iterable[str], options: Iterable[str], *, is_need: bool
) -> None:
    actions = {action.dest: action for action in parser._actions}
    named = [actions[other] for other in others]
    rules = [_Rule(actions[name], parser.get_default(name), named, is_need) for name in sorted(options)]
    parser.set_defaults(**{_DECLARED: [*(parser.get_default(_DECLARED) or ()), *rules]})


def _called(option: argparse.Action, *, is_off: bool = False) -> str:
    names = option.option_strings or [str(option.metavar or option.dest).upper()]
    return names[-1 if is_off else 0]
