"""Files that commands and scripts write: one rule for all of them, looked at before the work starts.

A file that holds something is overwritten only where `--overwrite` says so; one that cannot be written,
such as in a folder that is not there, is named at once. A folder with the journal of a run, which a later one
goes on with, is theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError


def check_writable(
    files: Mapping[str, str | os.PathLike[str] | None],
    *,
    overwrite: bool = False,
    way_out: str = "pass --overwrite",
) -> None:
    """Verify that files may be written, and leave all as it is.

    Args:
        files: by the names of their options; None is none.
        overwrite: whether those that are there may be written over.
        way_out: what to do instead of naming another file.

    Raises:
        ConfigError: one is there and holds something, or cannot be written.
    """
    for option, given in files.items():
        if given is None:
            continue
        path = pathlib.Path(given)
        try:
            is_there = path.exists()
            if is_there and path.is_file() and path.stat().st_size and not overwrite:
                raise ConfigError(
                    f"{option} {str(path)!r} exists, and nothing is overwritten: name another file, or "
                    f"{way_out}"
                )
            if not path.parent.is_dir():
                raise ConfigError(
                    f"{option} {path}: No such file or directory: there is no folder {path.parent}; make it, "
                    "or name another"
                )
            with path.open("ab"):
                pass
            if not is_there:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{option} {path}: {error.strerror}; name another file") from error


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add `--overwrite`."""
    parser.add_argument("--overwrite", action="store_true", help="write over files that are there")


def new_file(text: str) -> pathlib.Path:
    """Type of an option that names a file to write, for `OutputParser`."""
    return pathlib.Path(text)


class NewFolder:
    """Type of an option that names a folder to write files of some names into, for `OutputParser`."""

    def __init__(self, *names: str, journals: Sequence[str] = ()) -> None:
        """`names` are those of the files; where there is one of the `journals` they may be written anew."""
        self._names, self._journals = names, journals

    def files(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """What is there and would be written over."""
        if any((folder / name).exists() for name in self._journals):
            return []
        return [folder / name for name in self._names if (folder / name).exists()]

    def __call__(self, text: str) -> pathlib.Path:
        """A folder, or where there can be one."""
        path = pathlib.Path(text)
        file = next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), None)
        if file is not None:
            raise argparse.ArgumentTypeError(f"{str(file)!r} is a file; name a folder")
        return path


class OutputParser(argparse.ArgumentParser):
    """A script's parser, with `--overwrite`: checks what options of type `new_file` and `NewFolder` name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `argparse.ArgumentParser`."""
        super().__init__(*args, **kwargs)
        add_overwrite(self)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """The options; errors end the process, those of files that may not be written, too."""
        found = super().parse_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if value is None:
                continue
            name = action.option_strings[0] if action.option_strings else action.dest
            files: dict[str, pathlib.Path] = {}
            if action.type is new_file:
                files[name] = value
            elif isinstance(action.type, NewFolder):
                files = {f"{name}:": path for path in action.type.files(value)}
            self.check(files, overwrite=found.overwrite)
        return found

    def check(self, files: Mapping[str, pathlib.Path], *, overwrite: bool) -> None:
        """As `check_writable`; errors end the process."""
        with self.errors():
            check_writable(files, overwrite=overwrite)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """A `ConfigError` within ends the process, as one of the command line."""
        try:
            yield
        except ConfigError as error:
            self.error(str(error))
