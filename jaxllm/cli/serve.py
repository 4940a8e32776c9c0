"""`jaxllm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from jaxllm.cli import serve_ray
from jaxllm.commands.options import (
    add_engine_options,
    engine_settings,
    model_name,
    note,
    tell_of_programs,
)
from jaxllm.commands.words import known_elsewhere
from jaxllm.engine import processes
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.server.config import ServerConfig
from jaxllm.system.options import add_flags, given

_BEHIND = "serve behind a proxy (nginx, Caddy) that does it, or leave it out"
_TOOLS = "tools are called where tool_choice of a request demands it; leave it out"
_LOG = "use log_requests=False for none of them; leave it out"
_OF_VLLM = {
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "root_path", "middleware"), _BEHIND),
    **dict.fromkeys(("allowed_origins", "allowed_methods", "allowed_headers"), _BEHIND),
    **dict.fromkeys(("enable_auto_tool_choice", "tool_call_parser", "tool_parser_plugin"), _TOOLS),
    **dict.fromkeys(("disable_log_requests", "uvicorn_log_level", "max_log_len"), _LOG),
    "chat_template": "the checkpoint's is taken: put another into its folder as chat_template.jinja",
    "headless": "a process with --node-rank above 0 has no server; leave it out",
    "api_server_count": "use data_parallel_size for several engines behind one server",
}
"""vLLM's options of servers that there are not, and the way out."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, "
        "/health, /metrics, and a page at / that shows what the scheduler does. SIGTERM or Ctrl-C lets "
        "requests under way end; a second one does not wait."
    )
    add_flags(parser.add_argument_group("server options"), ServerConfig)
    serve_ray.add_options(parser)
    add_engine_options(parser)
    known_elsewhere(parser, _OF_VLLM)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit code."""
    if getattr(args, "node_rank", 0):
        return follow(args)
    with needs_server_packages():
        from jaxllm.server.run import listen, log_to_stderr, make_server, tune_interpreter
        from jaxllm.server.service import Service
    settings = engine_settings(args)
    config = ServerConfig(**given(args, ServerConfig))
    if config.is_open:
        note(f"{config.host} is reached from other machines, and no API key is asked for: set JAXLLM_API_KEY")
    if hasattr(args, "num_replicas"):
        return serve_ray.run(args, settings, config)
    engine = EngineConfig(**settings)
    listener = listen(config.host, config.port)  # now rather than after loading
    with listener:
        log_to_stderr()
        note(f"loading {model_name(settings)}")
        tell_of_programs()
        service = Service.load(engine, config)
        tune_interpreter()
        make_server(service, listener, note).run(sockets=[listener])
    return 0


def follow(args: argparse.Namespace) -> int:
    """Do what the leader of an engine says (`--node-rank`), until it ends."""
    for name in given(args, ServerConfig):
        raise ConfigError(
            f"--{name.replace('_', '-')} is of a server, and --node-rank {args.node_rank} has none: give it "
            "to the leader"
        )
    engine = EngineConfig(**engine_settings(args))
    note(f"following {engine.master_addr}:{engine.master_port} as node_rank={engine.node_rank}")
    processes.follow(engine)
    return 0


@contextlib.contextmanager
def needs_server_packages() -> Iterator[None]:
    """Imports of the server.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'the server needs further packages: pip install "jaxllm[serve]" ({error})'
        ) from error
