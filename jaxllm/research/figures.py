"""What draws: matplotlib, where it is installed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind people tell apart."""


def import_pyplot() -> ModuleType:
    """`matplotlib.pyplot`, which opens no windows.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError('--plot needs matplotlib: pip install "jaxllm[research]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Figure, path: Path) -> None:
    """Write a figure, and close it.

    Raises:
        ConfigError: matplotlib writes no such files.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
