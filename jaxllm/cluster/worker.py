"""What Ray Data runs: an actor with an engine, which answers shards of files or batches of a data set."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.cluster.answers import ANSWER_COLUMNS, answer_table
from jaxllm.cluster.attempts import Attempts, Turns
from jaxllm.cluster.cpu_slices import CpuSlice
from jaxllm.cluster.shards import RawRow, Shard, read_shard, row_of_values, rows_of_table
from jaxllm.errors import ConfigError, JaxllmError, RequestError

if TYPE_CHECKING:
    from jaxllm.cluster.batch_engine import BatchEngine, BatchSettings
    from jaxllm.cluster.parts import Parts


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """How an actor makes its engine.

    Args:
        llm: arguments of `LLM`.
        batch: what to do with rows.
        num_cpus: processors to bind it to; 0 leaves it unbound, as an engine on a GPU.
    """

    llm: Mapping[str, Any]
    batch: BatchSettings
    num_cpus: int


class _Engine:
    """An engine on a slice of processors of its own, which is taken before JAX starts.

    One that cannot be made says so to the first who asks: an actor that fails to start is started again, but
    a batch that fails ends the job with its cause.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._made: BatchEngine | JaxllmError
        self._slice = (
            CpuSlice(settings.num_cpus) if settings.num_cpus else None
        )  # held while the process lives
        if self._slice is not None:
            self._slice.bind()
        from jaxllm.cluster.batch_engine import BatchEngine
        from jaxllm.llm import LLM

        try:
            self._made = BatchEngine(lambda: LLM(**settings.llm), settings.batch)
        except JaxllmError as error:
            self._made = error

    def answer(self, rows: Sequence[RawRow]) -> list[dict[str, Any]]:
        """As `BatchEngine.answer`."""
        if isinstance(self._made, JaxllmError):
            raise self._made
        return self._made.answer(rows)


class ShardWorker:
    """Answers shards of files into parts; what it returns is only how many rows and errors there were."""

    def __init__(self, settings: WorkerSettings, parts: Parts, columns: Mapping[str, str] | None) -> None:
        self._engine = _Engine(settings)
        self._max_retries, self._turns = settings.batch.max_retries, Turns()
        self._parts, self._columns = parts, columns

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the shards of a batch that nobody has answered."""
        counts = [self._answer(Shard(**json.loads(text))) for text in batch["shard"]]
        return {"num_rows": [rows for rows, _ in counts], "num_errors": [errors for _, errors in counts]}

    def _answer(self, shard: Shard) -> tuple[int, int]:
        attempts = self._parts.attempts(shard)
        if self._parts.has(shard):  # whoever wrote it died before it could say so
            attempts.clear()
            return shard.num_rows, self._parts.num_errors(shard)
        num_deaths = attempts.begin()
        rows = read_shard(shard, self._columns)
        if num_deaths <= self._max_retries:
            with self._turns.together():
                answers = self._engine.answer(rows)
        else:  # one of them kills workers
            fatal = attempts.fatal_rows()
            answers = [self._answer_alone(row, attempts, row.index in fatal) for row in rows]
        self._parts.write(shard, answers)
        return shard.num_rows, sum("error" in answer for answer in answers)

    def _answer_alone(self, row: RawRow, attempts: Attempts, is_fatal: bool) -> dict[str, Any]:
        if is_fatal:
            message = f"{row.source}: two workers that had nothing else to do died of this"
            return self._engine.answer([dataclasses.replace(row, error=RequestError(message))])[0]
        with self._turns.alone():
            attempts.begin_row(row.index)
            answer = self._engine.answer([row])[0]
            attempts.end_row(row.index)
        return answer


class RowWorker:
    """Answers batches of a data set, which keep their columns and get those of answers."""

    def __init__(self, settings: WorkerSettings, columns: Mapping[str, str] | None) -> None:
        self._engine = _Engine(settings)
        self._columns = columns

    def __call__(self, table: Any) -> Any:
        """The pyarrow table of a batch, with the answers beside its rows.

        Raises:
            ConfigError: it has a column of an answer's name already.
        """
        taken = [name for name in ANSWER_COLUMNS if name in table.column_names]
        if taken:
            raise ConfigError(
                f"the data set has columns {', '.join(taken)}, as answers do: rename or drop them"
            )
        indices = table.column("index").to_pylist() if "index" in table.column_names else None
        rows = []
        for place, values in enumerate(rows_of_table(table, self._columns, "the data set")):
            index = _index_of(values) if indices is None else indices[place]
            rows.append(row_of_values(values, index, f"row {index}"))
        answers = answer_table(self._engine.answer(rows))
        for name in ANSWER_COLUMNS:
            table = table.append_column(name, answers.column(name))
        return table


def _index_of(values: Mapping[str, Any]) -> int:
    """What a row without an index is seeded by: all that it holds."""
    line = json.dumps(values, default=str)
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:7], "little")
