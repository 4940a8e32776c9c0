"""What errors say, in the command line's words: they are raised by code that is Python's as well."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Set

_CALLED, _ELSEWHERE = "flags_by_other_names", "ways_out_of_other_options"
_VALUE = r"(?P<value>True|False|None|'[^']*'|\"[^\"]*\"|[^\s,;:()'\"]+)"


_NESTED = r"[^()]"
for _ in range(3):
    _NESTED = rf"(?:[^()]|\({_NESTED}*\))"
_KEPT = rf"(?<!\w)(?:'[^']*'|\"[^\"]*\")(?!\w)|(?<=\w)\({_NESTED}*(?:\)|$)|<\w[^<>]*>"
"""What is somebody's text, a call's arguments, or how Python writes an object: no settings of ours."""


def call_too(parser: argparse.ArgumentParser, **names: str) -> None:
    """Say which flags of a command stand for what Python calls otherwise."""
    parser.set_defaults(**{_CALLED: names})


def known_elsewhere(parser: argparse.ArgumentParser, ways_out: Mapping[str, str]) -> None:
    """Say what a command answers to options that others have and it has not, by their settings' names."""
    parser.set_defaults(**{_ELSEWHERE: ways_out})


def way_out_of(parser: argparse.ArgumentParser, option: str) -> str | None:
    """What a parser, or one of its commands, says of an option that it has not."""
    found = [(parser.get_default(_ELSEWHERE) or {}).get(option.lstrip("-").replace("-", "_"))]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [way_out_of(one, option) for one in action.choices.values()]
    return next(filter(None, found), None)


class Flags(dict[str, str]):
    """Flags by the names of their settings; no help tells those of `unsaid`, which are only answered."""

    unsaid: Set[str] = frozenset()


def flags_of(parser: argparse.ArgumentParser) -> Flags:
    """The flag of each setting of a parser and its commands, by the setting's name."""
    found = Flags(parser.get_default(_CALLED) or {})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                of_command = flags_of(one)
                found.update(of_command)
                found.unsaid |= of_command.unsaid
        for option in action.option_strings:
            if option == "--" + action.dest.replace("_", "-"):
                found[action.dest] = option
                if action.help == argparse.SUPPRESS:
                    found.unsaid |= {action.dest}
    return found


def in_flags(message: str, flags: Flags) -> str:
    """A message whose settings, such as `max_num_seqs=0`, are flags with values: `--max-num-seqs 0`.

    Names of one word count only where a value follows, or the rule that the value breaks. What is in the
    command line's words already stays, and so does what stands in quotes, in a call, or for an object.
    """
    if not flags:
        return message
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    message = _changed(
        rf"(?<![\w.\"'-])(?P<name>{names})(?P<sign>=|<=|>=){_VALUE}",
        lambda found: _with_value(found, flags),
        message,
    )
    said = [re.escape(name) for name in flags if "_" in name and name not in flags.unsaid]
    several = "|".join(sorted(said, key=len, reverse=True))
    if several:
        bare = rf"(?<![\w.\"'-])(?P<name>{several})(?![\w=(])"
        message = _changed(bare, lambda found: flags[found["name"]], message)
    message = re.sub(rf"^({names})(?= must )", lambda found: flags[found[1]], message)
    return re.sub(r"(?:--[\w-]+|[a-z_]+=(?:'[^']*')?) \((--[\w-]+)\)", r"\1", message)


def _changed(pattern: str, change: Callable[[re.Match[str]], str], message: str) -> str:
    """A message in which what the pattern finds is changed, but for what is `_KEPT`."""
    return re.sub(
        rf"{pattern}|(?P<kept>{_KEPT})",
        lambda found: change(found) if found["kept"] is None else found["kept"],
        message,
    )


def _with_value(found: re.Match[str], flags: Mapping[str, str]) -> str:
    flag, value = flags[found["name"]], found["value"]
    if found["sign"] != "=":
        bound = "at most" if found["sign"] == "<=" else "at least"
        return f"{flag} of {bound} {value}"
    if value == "True":
        return flag
    if value == "False":
        return f"--no-{flag[2:]}"
    if value == "None":
        return f"no {flag}"
    return f"{flag} {value}"
