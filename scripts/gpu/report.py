"""What a part has measured: on disk after every row, with a reason for all that is missing."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxllm.research.bench.results import write_json

Row = dict[str, Any]


class Report:
    """Rows by measurement, and why some are missing.

    Args:
        out: file to keep them in; None keeps them in memory only.
        seconds: time to measure in, from now; what is not begun by then is left out.
        values: further entries of the file.
    """

    def __init__(self, out: Path | None, seconds: float, values: dict[str, Any]) -> None:
        self.results: dict[str, list[Row]] = {}
        self.missing: dict[str, str] = {}
        self.values = {**values, "results": self.results, "missing": self.missing}
        self._out, self._seconds = out, seconds
        self._deadline = time.perf_counter() + seconds
        self.write()

    def rows(self, name: str, rows: Iterable[Row]) -> list[Row]:
        """Keep the rows of a measurement as they come, until there are no more, time is up or it fails.

        A row with an `error` counts as missing.
        """
        found = self.results.setdefault(name, [])
        iterator = iter(rows)
        try:
            while True:
                if time.perf_counter() > self._deadline:
                    self.missing[name] = (
                        f"stopped after {len(found)} rows: the part's {self._seconds:.0f} s are used up"
                    )
                    break
                row = next(iterator, None)
                if row is None:
                    break
                found.append(row)
                if "error" in row:
                    self.missing[f"{name}, row {len(found)}"] = row["error"]
                self.write()
        except Exception as error:  # the other measurements are worth having
            self.fail(name, error)
        self.write()
        return found

    def fail(self, name: str, error: Exception) -> None:
        """Note that a measurement failed."""
        traceback.print_exception(error)
        self.missing[name] = describe(error)
        self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        if self._out is not None:
            replace_json(self._out, self.values)


def replace_json(path: Path, values: Any) -> None:
    """Write a JSON file anew; whoever reads it meanwhile, or ends this process, finds what it held."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write_json(unfinished, values)
    unfinished.replace(path)


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """The row with what `measure` returns, or with its `error`."""
    try:
        return row | measure()
    except Exception as error:  # other rows may do better
        return row | {"error": describe(error)}


def describe(error: Exception) -> str:
    """One line of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 600 else f'{text[:200]} ... {text[-400:]}'}"
