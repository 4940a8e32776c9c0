"""Completions of `jaxllm generate`, in a file that outlives crashes.

The output is JSON Lines: one line per prompt, exactly once, in order of completion. Each line starts
with `index` (the prompt's position in the input, from 0), `id` (the prompt's, or null) and
`fingerprint` (a hash of the prompt and its parameters), so that an interrupted run can be resumed:

    {"index": 2, "id": null, "fingerprint": "6f1c...", "text": "..."}
    {"index": 0, "id": "a", "fingerprint": "03be...", "te        <- killed here: dropped on resume
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.errors import RequestError
from jaxllm.jobs.prompts_io import OUTPUT_KEYS, PromptRow
from jaxllm.system.line_file import LineFile

_LINE_START = b'{"index": '


class OutputFile(LineFile[int]):
    """A crash-safe JSON Lines file of completions (`LineFile`), by the prompts' indices.

    Args:
        path: the file; created if absent, in a folder that exists.
        rows: the prompts, in input order.
        resume: continue an existing file: drop an incomplete last line and the errors of rows that have
            changed since, and check that every other line belongs to these rows. Without it a file that
            holds anything is refused.
        context: goes into the fingerprints, see `PromptRow.fingerprint`.

    Raises:
        ConfigError: see `LineFile`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Sequence[PromptRow],
        *,
        resume: bool = False,
        context: str = "",
    ) -> None:
        self._rows = {row.index: row for row in rows}
        self._fingerprints = {row.index: row.fingerprint(context) for row in rows}
        super().__init__(path, resume=resume, line_start=_LINE_START)

    def write(self, completions: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Appends a line for each `(index, content)`; on return they have reached the disk.

        Args:
            completions: row indices, and JSON-ready objects without `index`, `id` and `fingerprint`.

        Raises:
            RequestError: an index is no row's or already has a line, or a content holds a reserved key.
                Nothing of the batch is written.
            ConfigError: the disk is full or failed. Lines of earlier calls are kept.
        """
        lines: dict[int, str] = {}
        for index, content in completions:
            if index not in self._rows:
                raise RequestError(
                    f"index {index} is no row: it must be in {min(self._rows)}..{max(self._rows)}."
                )
            if index in self._done or index in lines:
                raise RequestError(f"index {index} already has a line in {self._path!r}: write it once.")
            for key in OUTPUT_KEYS:
                if key in content:
                    raise RequestError(f'completion {index} holds "{key}", which the file adds: remove it.')
            line = {"index": index, "id": self._rows[index].id, "fingerprint": self._fingerprints[index]}
            # ASCII only: U+2028 and its like would split lines for some readers.
            lines[index] = json.dumps(line | dict(content), allow_nan=False) + "\n"
        self._append("".join(lines.values()).encode("ascii"))
        self._done.update(lines)

    def _check_line(self, number: int, line: bytes) -> int | None:
        """The line's index, once it is known to be one of these rows' lines.

        None if it is the error of a row that has changed.
        """
        try:
            content = json.loads(line)
            index, fingerprint = content["index"], content["fingerprint"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(number, "it is no line of jaxllm's")
        if isinstance(index, bool) or not isinstance(index, int):
            self._refuse(number, "it is no line of jaxllm's")
        if index not in self._rows:
            self._refuse(number, f"it has index {index}, which is none of the {len(self._rows)} prompts")
        if fingerprint != self._fingerprints[index]:
            if "error" in content:
                return None
            self._refuse(
                number,
                f"its fingerprint differs from that of {self._rows[index].source}, which it answered as it "
                "was before",
            )
        return index

    def _describe(self, key: int) -> str:
        return f"index {key}"
