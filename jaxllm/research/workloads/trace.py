"""`Trace`: the requests of one experiment, with when each arrives and how long it is.

On disk a trace is one JSON object, a key a line, so that two traces can be compared with diff:

    {"format": "jaxllm-trace",
    "version": 4,
    "name": "chatbot",
    "seed": 0,
    "notes": [...],
    "arrival_times": [0.0, ...],       seconds
    "num_clients": 0,                  of a closed loop; 0 for an open one
    "think_times": null,               or seconds, in a closed loop or conversations
    "follows": null,                   or the request whose conversation each goes on with; -1 for none
    "common_lens": null,               or tokens that all prompts begin with
    "prompt_lens": [17, ...],          tokens
    "output_lens": [64, ...],          tokens
    "prompt_token_ids": null,          or one list of token ids a request
    "prompt_texts": null,              or one text a request
    "hash_ids": null,                  or one list of names of its prompt's blocks a request
    "hash_block_len": 512}             tokens of such a block
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads.checks import MAX_LEN, MAX_REQUESTS, MAX_SEED, check_integer
from jaxllm.research.workloads.columns import (
    MAX_TOKEN_ID,
    as_continued,
    as_hash_ids,
    as_lengths,
    as_seconds,
    as_texts,
    as_times,
    as_token_ids,
    check_count,
)
from jaxllm.research.workloads.seeding import random_token_ids
from jaxllm.system.options import checked_path
from jaxllm.system.output_files import check_writable

_FORMAT = "jaxllm-trace"
_VERSION = 4  # 1 had no closed loops, 2 no conversations, 3 no hashes
_HASHES: dict[str, Any] = {"hash_ids": None, "hash_block_len": 512}
_CONVERSATIONS: dict[str, Any] = {"follows": None, "common_lens": None}
_NEW_FIELDS: dict[int, dict[str, Any]] = {
    1: {"num_clients": 0, "think_times": None, **_CONVERSATIONS, **_HASHES},
    2: _CONVERSATIONS | _HASHES,
    3: _HASHES,
}
_COMMON_STREAM = 2**32
"""Where the tokens are drawn from that prompts have in common; of no request."""
_HASH_STREAM = 2**33
"""Where those of the first named block are drawn from; others follow."""
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival. Arrays are read-only; whatever sequences are given are copied.

    Args:
        name: what the trace is called in reports.
        seed: of the prompts' token ids where no real ones are given, and of whatever was drawn.
        arrival_times: float64 `[num_requests]`, seconds from the start of the trace, never decreasing.
        prompt_lens: int64 `[num_requests]`, tokens of each prompt.
        output_lens: int64 `[num_requests]`, tokens each request generates.
        prompt_token_ids: the prompts themselves, each as long as `prompt_lens` says.
        prompt_texts: the prompts as text; their number of tokens is up to the tokenizer that reads them.
            A trace has texts or token ids or neither, not both.
        num_clients: who send the requests in a closed loop, in turn of their answers (`Feed`); 0 if requests
            come at `arrival_times`, which else are all 0.
        think_times: float64 `[num_requests]`, seconds between an answer and the sending of the next request,
            in the order of these; of a request that follows another, since that one's answer. Only in a
            closed loop or conversations, none if None.
        follows: int64 `[num_requests]`: the request, before it in the trace, that it goes on with, or -1. Its
            prompt is that one's prompt and answer and then tokens of its own; it is sent after that answer,
            whatever its arrival time is. None if none does. Only where the trace makes token ids up.
        common_lens: int64 `[num_requests]`: with how many tokens, the same in all, each prompt begins; of a
            request that follows another that is as its first one's. None is none.
        hash_ids: of each request the names of its prompt's blocks, of `hash_block_len` tokens each but the
            last, which may be shorter: blocks of one name have the same tokens, others share none but by
            chance. Only where the trace makes token ids up, and not beside `follows` and `common_lens`.
        hash_block_len: tokens of such a block.
        notes: where the trace is from and what was done to it (rows left out, ...), for people.

    Raises:
        ConfigError: `name`, `seed` or `notes` is malformed, or there is no request, or too many.
        RequestError: a request is malformed; the message names it by index.
    """

    name: str
    seed: int
    arrival_times: npt.NDArray[np.float64]
    prompt_lens: npt.NDArray[np.int64]
    output_lens: npt.NDArray[np.int64]
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    prompt_texts: tuple[str, ...] | None = None
    num_clients: int = 0
    think_times: npt.NDArray[np.float64] | None = None
    follows: npt.NDArray[np.int64] | None = None
    common_lens: npt.NDArray[np.int64] | None = None
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    hash_block_len: int = 512
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.notes, list | tuple) or not all(isinstance(note, str) for note in self.notes):
            raise ConfigError(f"notes must be a sequence of strings, got {self.notes!r}")
        prompt_lens = as_lengths("prompt_lens", self.prompt_lens)
        values: dict[str, Any] = {
            "seed": check_integer("seed", self.seed, 0, MAX_SEED),
            "notes": tuple(self.notes),
            "arrival_times": as_times(self.arrival_times),
            "prompt_lens": prompt_lens,
            "output_lens": as_lengths("output_lens", self.output_lens),
            "num_clients": check_integer("num_clients", self.num_clients, 0, MAX_REQUESTS),
            "prompt_token_ids": as_token_ids(self.prompt_token_ids, prompt_lens),
            "prompt_texts": as_texts(self.prompt_texts, prompt_lens),
            "hash_block_len": check_integer("hash_block_len", self.hash_block_len, 1, MAX_LEN),
            "hash_ids": as_hash_ids(self.hash_ids, prompt_lens, self.hash_block_len),
        }
        for name in ("arrival_times", "output_lens"):
            check_count(name, values[name], len(prompt_lens))
        if self.prompt_token_ids is not None and self.prompt_texts is not None:
            raise ConfigError("a trace holds prompt_token_ids or prompt_texts, not both; drop one")
        if self.num_clients and values["arrival_times"].any():
            raise ConfigError("in a closed loop requests come after answers; set all arrival_times to 0")
        if self.hash_ids is not None and (self.prompt_token_ids or self.prompt_texts):
            raise ConfigError("hash_ids stand for prompts that are not known; drop them or the prompts")
        if self.think_times is not None:
            if not self.num_clients and self.follows is None:
                raise ConfigError(
                    "think_times are of a closed loop or conversations; set num_clients or follows, or drop "
                    "them"
                )
            values["think_times"] = as_seconds("think_times", self.think_times)
            check_count("think_times", values["think_times"], len(prompt_lens))
        if self.follows is not None or self.common_lens is not None:
            if any(one is not None for one in (self.prompt_token_ids, self.prompt_texts, self.hash_ids)):
                raise ConfigError(
                    "follows and common_lens are of prompts that the trace makes up, without hash_ids; drop "
                    "them"
                )
            if self.follows is not None and self.num_clients:
                raise ConfigError("a trace has clients or conversations, not both; drop follows")
            values |= as_continued(self.follows, self.common_lens, prompt_lens, values["output_lens"])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.prompt_lens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
            for mine, theirs in zip(self._values().values(), other._values().values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, seed={self.seed}, num_requests={len(self)})"

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests` requests, with the same prompts.

        Raises:
            ConfigError: there are not as many, or fewer than one is asked for.
        """
        num_requests = check_integer("num_requests", num_requests, 1, MAX_REQUESTS)
        if num_requests > len(self):
            raise ConfigError(
                f"num_requests={num_requests}: trace {self.name!r} has {len(self)} requests; ask for as "
                "many at most, or leave it out for all of them"
            )
        return self.take(np.arange(num_requests))

    def take(self, indices: npt.NDArray[np.int64]) -> Trace:
        """The requests at `indices`, ascending, with their arrival times and lengths.

        Prompts that the trace makes up are drawn anew where a request changes its place.

        Raises:
            RequestError: a request goes on with one that is not taken.
        """
        places = indices.tolist()
        values: dict[str, Any] = {}
        for name in ("prompt_token_ids", "prompt_texts", "hash_ids"):
            rows = getattr(self, name)
            values[name] = None if rows is None else tuple(rows[place] for place in places)
        for name in ("arrival_times", "prompt_lens", "output_lens", "think_times", "common_lens"):
            array = getattr(self, name)
            values[name] = None if array is None else array[indices]
        if self.follows is not None:
            new = np.full(len(self) + 1, -2)  # the last one is of -1
            new[indices], new[-1] = np.arange(len(indices)), -1
            values["follows"] = new[self.follows[indices]]
        return dataclasses.replace(self, **values)

    def token_ids(self, index: int, vocab_size: int, before: Sequence[int] = ()) -> list[int]:
        """The prompt of request `index`: its own token ids, or random ones of its length.

        Random ids depend on seed, index, length and `vocab_size` alone. Texts are not looked at: encode
        `prompt_texts[index]` to run the text itself.

        Args:
            index: of the request, from 0.
            vocab_size: token ids lie in `[0, vocab_size)`.
            before: prompt and answer of the request that it `follows`.

        Raises:
            ConfigError: an argument is out of range, or `before` is not as long as the trace says.
            RequestError: the trace's own token ids do not fit the vocabulary.
        """
        index = check_integer("index", index, 0, len(self) - 1)
        vocab_size = check_integer("vocab_size", vocab_size, 1, MAX_TOKEN_ID + 1)
        if self.prompt_token_ids is None:
            length, follows = int(self.prompt_lens[index]), self.followed(index)
            expected = 0 if follows < 0 else int(self.prompt_lens[follows] + self.output_lens[follows])
            if len(before) != expected:
                raise ConfigError(
                    f"request {index} goes on after {expected} tokens, and before has {len(before)}"
                )
            given = list(before)
            if self.hash_ids is not None:
                given = self._named_tokens(index, vocab_size)
            elif self.common_lens is not None and follows < 0:
                common = int(self.common_lens[index])
                given = random_token_ids(self.seed, _COMMON_STREAM, common, vocab_size)
            return given + random_token_ids(self.seed, index, length - len(given), vocab_size)
        token_ids = list(self.prompt_token_ids[index])
        if max(token_ids) >= vocab_size:
            raise RequestError(
                f"request {index} of trace {self.name!r} holds token id {max(token_ids)}; the vocabulary has "
                f"{vocab_size}: use the model whose tokenizer made the trace"
            )
        return token_ids

    def _named_tokens(self, index: int, vocab_size: int) -> list[int]:
        """The prompt that `hash_ids` stand for."""
        assert self.hash_ids is not None
        found: list[int] = []
        for name in self.hash_ids[index]:
            count = min(self.hash_block_len, int(self.prompt_lens[index]) - len(found))
            found += random_token_ids(self.seed, _HASH_STREAM + name, count, vocab_size)
        return found

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may begin alike for another reason than chance, so that a prefix cache matters."""
        given = self.prompt_token_ids, self.hash_ids, self.follows, self.common_lens
        return any(one is not None for one in given)

    def followed(self, index: int) -> int:
        """The request that a request goes on with; -1 if there is none."""
        return -1 if self.follows is None else int(self.follows[index])

    def summary(self) -> dict[str, Any]:
        """Statistics as a JSON object: lengths in tokens, times in seconds, rates in requests a second.

        `request_rate` counts the gaps between arrivals, and is None where they all are zero;
        `interarrival_s` is None for a single request, and `think_s` outside closed loops. Percentiles are
        interpolated linearly.
        """
        gaps = np.diff(self.arrival_times)
        duration = float(self.arrival_times[-1] - self.arrival_times[0])
        return {
            "name": self.name,
            "seed": self.seed,
            "num_requests": len(self),
            "duration_s": duration,
            "request_rate": len(gaps) / duration if duration > 0 else None,
            "interarrival_s": _describe(gaps) if len(gaps) else None,
            "num_clients": self.num_clients,
            "think_s": None if self.think_times is None else _describe(self.think_times),
            "prompt_tokens": {"total": int(self.prompt_lens.sum()), **_describe(self.prompt_lens)},
            "output_tokens": {"total": int(self.output_lens.sum()), **_describe(self.output_lens)},
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the trace as JSON. The file appears whole or not at all, and `load` gives an equal trace.

        Raises:
            ConfigError: the file cannot be written; or it is there, and holds something, and is not to be
                overwritten.
        """
        target = Path(checked_path("path", path))
        check_writable(
            {"cannot write the trace:": target}, overwrite=overwrite, way_out="pass overwrite=True"
        )
        content = {"format": _FORMAT, "version": _VERSION, **self._values()}
        lines = [
            f"{json.dumps(key)}: {json.dumps(value.tolist() if isinstance(value, np.ndarray) else value)}"
            for key, value in content.items()
        ]
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="ascii") as file:
                file.write("{" + ",\n".join(lines) + "}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {str(target)!r} ({error.strerror}).") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `save` wrote.

        Raises:
            ConfigError: the file cannot be read, or is no trace, or of another version.
            RequestError: a request in it is malformed.
        """
        name = checked_path("path", path)
        try:
            content = json.loads(Path(name).read_bytes(), parse_constant=_refuse_constant)
        except OSError as error:
            raise ConfigError(f"cannot read the trace {name!r} ({error.strerror}).") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: no valid JSON ({error}). Make the trace again.") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ConfigError(f'{name}: is no trace; a trace is a JSON object with "format": "{_FORMAT}".')
        version = content.pop("version", None)
        if type(version) is int and version in _NEW_FIELDS:
            content = _NEW_FIELDS[version] | content
        elif version != _VERSION:
            raise ConfigError(f"{name}: has trace version {version!r}; this jaxllm reads 1 to {_VERSION}.")
        keys = [field.name for field in dataclasses.fields(cls)]
        if content.keys() != set(keys):
            raise ConfigError(f"{name}: has the keys {', '.join(content)}; a trace has {', '.join(keys)}.")
        try:
            return cls(**content)
        except (ConfigError, RequestError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _describe(values: npt.NDArray[Any]) -> dict[str, float]:
    percentiles = np.percentile(values, _PERCENTILES).tolist()
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": values.min().item(),
        **{f"p{p}": value for p, value in zip(_PERCENTILES, percentiles, strict=True)},
        "max": values.max().item(),
    }


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
