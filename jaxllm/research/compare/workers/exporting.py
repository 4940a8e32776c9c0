"""Checkpoints in another framework's own form, written beside them once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def exported(checkpoint: Path, kind: str, marker: str, write: Callable[[Path], object]) -> Path:
    """The folder beside a checkpoint that holds it in another form, written anew if older than it.

    Args:
        checkpoint: its folder.
        kind: how the other one's name ends.
        marker: a file that it has when it is whole.
        write: makes such a folder, in a process of its own, whose memory does not count as the engine's.
    """
    folder = checkpoint.with_name(f"{checkpoint.name}-{kind}")
    newest = max(path.stat().st_mtime for path in checkpoint.iterdir())
    if (folder / marker).is_file() and (folder / marker).stat().st_mtime > newest:
        return folder
    unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        write(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
