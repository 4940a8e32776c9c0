"""What a page of the documentation says, and what is wrong with it."""

import argparse
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from markdown_it import MarkdownIt
from markdown_it.token import Token

from jaxllm import LLM, BeamSearchParams, EngineConfig, SamplingParams, StructuredOutputsParams
from jaxllm.cli.main import build_parser
from jaxllm.commands.needs import check_needs
from jaxllm.engine.vllm_names import SETTINGS
from jaxllm.errors import ConfigError
from jaxllm.functional import prefill
from jaxllm.pallas_kernels import decode_attention
from jaxllm.sched.policies import SchedulerPolicy

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SHELLS = ("", "bash")
FOLDERS = ("benchmarks", "docs", "examples", "jaxllm", "pallas_kernels", "predictors", "sched", "scripts")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced or indented block, and the line that its text begins in."""

    language: str
    text: str
    line: int


class Page:
    """A page's blocks, code in its text, links and headings."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if text is None else text
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        self.blocks = [
            Block(token.info.strip(), token.content, (token.map or [0])[0] + (token.type == "fence"))
            for token in tokens
            if token.type in ("fence", "code_block")
        ]
        inline = [part for token in tokens for part in token.children or ()]
        self.spans = [part.content for part in inline if part.type == "code_inline"]
        self.links = [link for part in inline if (link := _target(part))]
        self.anchors = {
            _slug(after.content)
            for token, after in itertools.pairwise(tokens)
            if token.type == "heading_open"
        }
        self.documented = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)

    def python(self) -> list[Block]:
        return [block for block in self.blocks if block.language == "python"]

    def commands(self) -> list[list[str]]:
        """The words of each command line that a reader may type."""
        found = []
        for block in self.blocks:
            if block.language in SHELLS:
                lines = block.text.replace("\\\n", " ").splitlines()
                found += [words for line in lines if (words := _words(line))]
        return found + [words for span in self.spans if (words := _words(span))]


def _target(token: Token) -> str | None:
    value = token.attrs.get("href") if token.type == "link_open" else token.attrs.get("src")
    return None if value is None else str(value)


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def _words(line: str) -> list[str] | None:
    """Of a command that is ours; None of anything else."""
    if not re.match(r"(\w+=\S* )*(jaxllm|make|[\w/]*python) ", line):
        return None
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        del words[0]
    if words[0].endswith("python") and not words[1].startswith(("scripts/", "examples/")):
        return None
    return words


# What is wrong


def command_problem(words: Sequence[str]) -> str | None:
    """Why a command line would be refused before it does anything."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return next((f"make has no {word!r}" for word in words[1:] if word not in targets), None)
    if words[0] == "jaxllm":
        parser = build_parser()
        if len(words) == 2:  # the name of a command
            (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
            return None if words[1] in commands.choices else f"jaxllm has no {words[1]!r}"
        return _exit_message(lambda: check_needs(parser.parse_args(words[1:])))
    script, arguments = ROOT / words[1], list(words[2:])
    if not script.is_file():
        return f"there is no {words[1]}"
    if ".parse_args(" not in script.read_text(encoding="utf-8"):
        return f"{words[1]} takes no arguments" if arguments else None
    return _exit_message(lambda: _parse_as_script(script, arguments))


class _Parsed(BaseException):
    """A script's arguments are all right; nothing else of it is to run."""


def _parse_as_script(script: Path, arguments: Sequence[str]) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*args: object, **kwargs: object) -> None:
        parse(*args, **kwargs)  # type: ignore[arg-type, call-overload]
        raise _Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.dict(os.environ),
        mock.patch("tempfile.TemporaryDirectory"),  # nor is anything to be left of it
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.suppress(_Parsed),
    ):
        runpy.run_path(str(script), run_name="__main__")
        raise AssertionError(f"{script.name} ran to its end without parsing its arguments")


def _exit_message(parse) -> str | None:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parse()
    except SystemExit:
        return stderr.getvalue().strip().splitlines()[-1]
    except ConfigError as error:
        return str(error)
    return None


def known_options() -> set[str]:
    """Options of the command and of all scripts."""
    (commands,) = (one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction))
    options = {name for parser in commands.choices.values() for name in parser._option_string_actions}
    for script in (ROOT / "scripts").rglob("*.py"):
        options |= set(re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8")))
    return options


def known_arguments() -> set[str]:
    """Settings, parameters and arguments that text may write as `name=value`."""
    functions = (LLM, EngineConfig, SamplingParams, BeamSearchParams, StructuredOutputsParams)
    functions += (SchedulerPolicy, LLM.generate, LLM.chat, LLM.sleep, decode_attention, prefill)
    return {name for one in functions for name in inspect.signature(one).parameters} | set(SETTINGS)


def span_problems(span: str) -> Iterator[str]:
    """What code in a text names that there is not."""
    if span.startswith("--"):
        option = re.split(r"[ =]", span)[0]
        if option not in known_options():
            yield f"nothing takes {option}"
        return
    if re.fullmatch(r"jaxllm(\.\w+)+", span):
        try:
            pkgutil.resolve_name(span)
        except (AttributeError, ImportError) as error:
            yield f"there is no {span}: {error}"
    if re.fullmatch(rf"({'|'.join(FOLDERS)}|tests)/[\w./-]*", span) and not (ROOT / span).exists():
        yield f"there is no {span}"
    for name in re.findall(r"(?:^|[(, ])([a-z]\w*)=(?!=)", span):
        if name not in known_arguments():
            yield f"nothing takes {name}="


def link_problem(page: Page, link: str) -> str | None:
    """Why a link leads nowhere; those to other sites are not looked at."""
    if "://" in link:
        return None
    name, _, anchor = link.partition("#")
    path = Path(os.path.normpath(page.path.parent / name)) if name else page.path
    if (name and not path.exists()) or not path.is_relative_to(ROOT):
        return f"{link} leads to nothing in the repository"
    if not anchor:
        return None
    target = page if path == page.path else Page(path)
    if anchor in target.anchors:
        return None
    if not any(f"{anchor}.".startswith(f"{one}.") for one in target.documented):
        return f"{link}: no heading, and nothing documented there, has this name"
    return next(span_problems(anchor), None)
