"""The command `jaxllm`: parsing, dispatch, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jaxllm
from jaxllm.commands.needs import check_needs
from jaxllm.commands.options import loggers_put_back
from jaxllm.commands.signals import lost_interrupts_return
from jaxllm.commands.words import flags_of, in_flags, way_out_of
from jaxllm.errors import JaxllmError, did_you_mean
from jaxllm.system.options import is_encodable

EXIT_OK = 0
EXIT_BROKEN_PIPE = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

COMMANDS: Mapping[str, tuple[str, str]] = {
    "generate": ("jaxllm.cli.generate", "complete prompts"),
    "serve": ("jaxllm.cli.serve", "serve a model to clients of OpenAI's API"),
    "run-batch": ("jaxllm.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "convert": ("jaxllm.cli.convert", "convert a checkpoint to Orbax, which loads straight onto the device"),
    "convert-bin": ("jaxllm.cli.convert_bin", "convert pickled weights to safetensors"),
    "bench": ("jaxllm.research.commands.bench", "measure an engine"),
    "profile": ("jaxllm.research.commands.profile", "measure step and swap costs, and fit predictors"),
    "plan": ("jaxllm.research.commands.plan", "what a model needs on a GPU, without one"),
    "simulate": (
        "jaxllm.research.commands.simulate",
        "scheduling policies on a simulated device",
    ),
    "explain": ("jaxllm.research.commands.explain", "summarise a decision ledger"),
    "make-model": (
        "jaxllm.research.commands.make_model",
        "write a checkpoint of random weights",
    ),
    "compare": ("jaxllm.research.commands.compare", "measure frameworks side by side"),
    "validate-costs": (
        "jaxllm.research.commands.validate_costs",
        "costs from measured kernels against measured servers",
    ),
    "eval-quantised": (
        "jaxllm.research.commands.eval_quantised",
        "how near a checkpoint's predictions are to another's",
    ),
    "replay-oracle": ("jaxllm.research.commands.replay_oracle", "replay recorded decisions of vLLM"),
}
"""Of each command the module, whose `add_options` describes it, and what it is for."""

_UNRECOGNIZED = "unrecognized arguments: "


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """All options of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(*(_flags(one) for one in action.choices.values()))
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report a usage error in one line, as every other error."""
        if message.startswith(_UNRECOGNIZED):
            option = message.removeprefix(_UNRECOGNIZED).split()[0].partition("=")[0]
            way_out = way_out_of(self, option)
            if way_out is not None:
                message = f"{option} is not supported: {way_out}"
            else:
                message += f"; {did_you_mean(option, _flags(self))}".rstrip("; ")
        message = re.sub(r"^argument (--[\w-]+): \1 ", r"\1 ", in_flags(message, flags_of(self)))
        self.exit(EXIT_ERROR, f"jaxllm: error: {message} (see `{self.prog} --help`)\n")


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; if `command` is given, of that one only, as no other is imported."""
    parser = _Parser(
        prog="jaxllm",
        description="LLM inference in JAX: complete prompts, serve models, convert checkpoints, measure.",
        epilog="`jaxllm COMMAND --help` explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxllm {jaxllm.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    for name, (module, text) in COMMANDS.items():
        of_command = commands.add_parser(name, help=text)
        if name == command or command is None:
            importlib.import_module(module).add_options(of_command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 when all went well, 2 for wrong usage, configuration or input, 130 when interrupted.
    """
    try:
        with lost_interrupts_return():
            return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("jaxllm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    parser = build_parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help()
        return EXIT_OK
    if bad := [one for one in arguments if not is_encodable(one)]:
        print(f"jaxllm: error: {bad[0][:80]!a} holds what is no character of arguments", file=sys.stderr)
        return EXIT_ERROR
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own policy is imported from
    try:
        args = parser.parse_args(arguments)
        args.command_line = arguments
        check_needs(args)
        with loggers_put_back():
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as error:  # argparse's, after --help, --version or wrong usage
        return error.code if isinstance(error.code, int) else EXIT_ERROR
    except BrokenPipeError:  # the reader of stdout has gone, as in `jaxllm generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (JaxllmError, OSError) as error:
        flags = flags_of(parser)
        message = error.told(flags) if isinstance(error, JaxllmError) else str(error)
        print(f"jaxllm: error: {in_flags(' '.join(message.split()), flags)}", file=sys.stderr)
        return EXIT_ERROR
