"""`jaxllm run-batch`: a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse

from jaxllm.cli.serve import needs_server_packages
from jaxllm.commands.options import (
    add_engine_options,
    check_distinct,
    engine_settings,
    model_name,
    note,
    tell_of_programs,
)
from jaxllm.commands.progress import Progress
from jaxllm.engine.config import EngineConfig
from jaxllm.jobs.row_requests import fingerprint_context
from jaxllm.server.config import ServerConfig
from jaxllm.system.options import add_flags, given

_EXIT_INTERRUPTED = 130
_MAX_QUEUED = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Answer a file of requests, an object of custom_id, method, url and body a line. Each answer "
        "is a line, safe on disk as soon as it is there; a request that is refused gets one that says "
        "why. All lines are checked before the first one runs."
    )
    parser.add_argument("-i", "--input", metavar="FILE", required=True, help="requests, JSON lines")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="append answers to FILE")
    parser.add_argument(
        "--resume", action="store_true", help="continue an interrupted --output: run only what it lacks"
    )
    add_flags(parser, ServerConfig, ["served_model_names"])
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the requests; returns the exit code."""
    with needs_server_packages():
        from jaxllm.server.batch import BatchOutput, read_batch, run_batch
        from jaxllm.server.service import Service
    settings = engine_settings(args)
    check_distinct({"--input": args.input, "--output": args.output, "--ledger": settings.get("ledger")})
    config = ServerConfig(
        **given(args, ServerConfig),
        api_keys=(),
        max_queued_requests=_MAX_QUEUED,
        max_queued_tokens=2**40,
        max_body_bytes=2**30,
        max_total_body_bytes=2**36,
        log_requests=False,
    )
    lines = read_batch(args.input, fingerprint_context(settings, False))
    with BatchOutput(args.output, lines, resume=args.resume) as output:
        if output.done and not args.quiet:
            note(f"{len(output.done)} of {len(lines)} requests are in {args.output} already")
        if len(output.done) == len(lines):
            return 0
        engine = EngineConfig(**settings)
        if not args.quiet:
            note(f"loading {model_name(settings)}")
            tell_of_programs()
        progress = Progress(len(lines), len(output.done), "request", quiet=args.quiet)
        try:
            with progress:
                service = Service.load(engine, config)
                num_errors = run_batch(service, args.input, lines, output, progress.advance)
        except KeyboardInterrupt:
            note(f"interrupted: {len(output.done)} of {len(lines)} requests are answered; --resume continues")
            return _EXIT_INTERRUPTED
        if num_errors and not args.quiet:
            note(f"{num_errors} requests were refused: their lines have a status_code other than 200")
    return 0
