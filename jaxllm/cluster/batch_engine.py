"""An engine that answers batches of rows, several at once, and says of each row what is wrong with it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.cluster.shards import RawRow
from jaxllm.errors import EngineError, JaxllmError
from jaxllm.jobs.prompts_io import PromptRow, parse_row
from jaxllm.jobs.row_requests import checked_token_ids, completion_content, with_seed
from jaxllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """What the answers to rows depend on, beside the model.

    Args:
        sampling_params: of rows that have none of their own; the model's default ones if None.
        chat: whether prompts are messages of a user.
        seed: of which and a row's index the row's own is made.
        context: goes into fingerprints; see `PromptRow.fingerprint`.
        max_retries: how often a batch is tried again with a new engine, should the engine fail.
    """

    sampling_params: SamplingParams | None
    chat: bool
    seed: int
    context: str
    max_retries: int


class BatchEngine:
    """Any number of threads may give it batches; all run in one engine, so that it is never short of rows.

    Args:
        make_llm: makes the engine, and another one if that fails.
        settings: what to do with rows.
    """

    def __init__(self, make_llm: Callable[[], LLM], settings: BatchSettings) -> None:
        self._make_llm, self._settings = make_llm, settings
        self._lock = threading.Lock()
        self._llm = make_llm()

    def answer(self, rows: Sequence[RawRow]) -> list[dict[str, Any]]:
        """JSON-ready answers, in order; those to bad rows say what is wrong in `error`.

        Raises:
            EngineError: the engine failed, and again after each retry.
        """
        attempt = 0
        while True:
            llm = self._llm
            try:
                return self._answer(llm, rows)
            except EngineError as error:
                attempt += 1
                if attempt > self._settings.max_retries:
                    raise
                _logger.warning("the engine failed (%s); trying again with a new one", error)
                self._replace(llm)

    def close(self) -> None:
        """Let go of the device."""
        self._llm.close()

    def _replace(self, failed: LLM) -> None:
        """Another engine, unless another thread has already made one."""
        with self._lock:
            if self._llm is failed:
                failed.close()
                self._llm = self._make_llm()

    def _answer(self, llm: LLM, raw_rows: Sequence[RawRow]) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        good: list[PromptRow] = []
        prompts: list[Mapping[str, Any]] = []
        for raw in raw_rows:
            row: PromptRow | None = None
            try:
                row = self._row(llm, raw)
                token_ids = checked_token_ids(llm, row, self._settings.chat)
            except EngineError:
                raise
            except JaxllmError as error:
                answers[raw.index] = self._line(raw.index, row) | {
                    "error": f"{type(error).__name__}: {error}"
                }
            else:
                good.append(row)
                prompts.append(
                    {
                        "prompt_token_ids": token_ids,
                        "num_dropped_tokens": row.num_dropped_tokens,
                        "sampling_params": row.sampling_params,
                    }
                )
        for row, output in zip(good, llm.generate_iter(prompts), strict=True):
            answers[row.index] = self._line(row.index, row) | completion_content(row, output)
        return [answers[raw.index] for raw in raw_rows]

    def _row(self, llm: LLM, raw: RawRow) -> PromptRow:
        if raw.error is not None:
            raise raw.error
        defaults = self._settings.sampling_params or llm.get_default_sampling_params()
        return with_seed(parse_row(raw.index, raw.source, raw.line, defaults), self._settings.seed)

    def _line(self, index: int, row: PromptRow | None) -> dict[str, Any]:
        """What each line begins with, as in `jaxllm generate`."""
        if row is None:
            return {"index": index, "id": None, "fingerprint": None}
        return {"index": index, "id": row.id, "fingerprint": row.fingerprint(self._settings.context)}
