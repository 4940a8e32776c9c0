"""Any number of rows through an engine: each is taken as it is needed, and has one output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxllm.engine.inputs import Prompt, refuse_table
from jaxllm.engine.outputs import RequestOutput
from jaxllm.engine.thread import OutputStream
from jaxllm.errors import ConfigError, RequestError, SamplingParamsError, shown
from jaxllm.sampling.params import SamplingParams

Row = Prompt | Mapping[str, Any]
_OF_ROWS = "sampling_params", "priority", "deadline"
_MOST_KEPT = 8  # outputs that wait for an earlier one, of those in flight


def checked_rows(rows: Any, first_place: Any) -> Iterable[Row]:
    """Rows, one prompt being one of them.

    Raises:
        ConfigError, RequestError: there are none, but a table, say, or the first one's place is no number.
    """
    if isinstance(first_place, bool) or not isinstance(first_place, int) or first_place < 0:
        raise ConfigError(f"first_place={shown(first_place)} must be an integer of at least 0")
    refuse_table(rows)
    if isinstance(rows, str | Mapping):
        return [rows]
    if not isinstance(rows, Iterable) or isinstance(rows, bytes):
        raise ConfigError(
            f"rows={shown(rows)} must be prompts, one after another: give a list or an iterator"
        )
    return rows


def answers(
    open_stream: Callable[[], OutputStream],
    rows: Iterator[tuple[str, int, Row]],
    params: SamplingParams,
    most: int,
    following: int | None,
) -> Iterator[RequestOutput]:
    """Outputs of rows, of which so many are under way at once; see `LLM.generate_iter`.

    Args:
        open_stream: gives outputs of no requests yet.
        rows: ids that are never used twice, places, and rows.
        params: of rows without.
        most: requests that are queued or run at once.
        following: the first row's place, if outputs are to be in order.
    """
    ended = dict[int, RequestOutput]()
    with contextlib.closing(open_stream()) as stream:
        is_exhausted = False
        while True:
            while not is_exhausted and stream.num_unfinished < most and len(ended) < _MOST_KEPT * most:
                request_id, place, row = next(rows, ("", -1, ""))
                if is_exhausted := place < 0:
                    break
                try:
                    stream.add(request_id, place, _arguments(row, params))
                except (RequestError, SamplingParamsError) as error:
                    ended[place] = RequestOutput.refused(str(place), error)
            if following is None:
                yield from ended.values()
                ended.clear()
            while following in ended:
                yield ended.pop(following)
                following += 1
            if stream.num_unfinished:
                output = next(stream)
                ended[int(output.request_id)] = output
            elif is_exhausted and not ended:
                return


def _arguments(row: Row, params: SamplingParams) -> dict[str, Any]:
    """Of `Engine.prepare`, for a row."""
    arguments: dict[str, Any] = {"prompt": row, "sampling_params": params}
    if isinstance(row, Mapping):
        own = {name: row[name] for name in _OF_ROWS if name in row}
        prompt = {name: value for name, value in row.items() if name not in own}
        arguments |= {"prompt": prompt, **{name: value for name, value in own.items() if value is not None}}
    return arguments
