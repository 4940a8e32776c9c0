"""What draws: matplotlib, where it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError, reason

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


def check_picture(path: str | os.PathLike[str] | None) -> None:
    """Verify before the work that what `--plot` names can be drawn; None is nothing to draw.

    Raises:
        ConfigError: matplotlib is not installed, or writes no files that end so.
    """
    if path is None:
        return
    import_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ConfigError(
            f"--plot {os.fspath(path)} is no picture's name: it must end in .{', .'.join(sorted(known))}"
        )


def save(figure: Figure, path: Path) -> None:
    """Write a figure, and close it.

    Raises:
        ConfigError: matplotlib writes no such files, or this one cannot be written.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {reason(error)}; name another file") from error
    finally:
        pyplot.close(figure)
