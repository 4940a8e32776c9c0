"""Files of requests in OpenAI's batch format, answered once each whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxllm.errors import ConfigError, EngineError, RequestError, shown
from jaxllm.server.app import make_app
from jaxllm.server.errors import refused
from jaxllm.server.in_process import call
from jaxllm.server.service import Service
from jaxllm.system.json_text import parse
from jaxllm.system.line_file import LineFile

URLS = ("/v1/completions", "/v1/chat/completions")
_KEYS = {"custom_id", "method", "url", "body"}
_MAX_ID = 512
_PREFIX = "batch_req_"
_LINE_START = b'{"id": "batch_req_'
_ROUNDS = 2  # of requests that run, at a time, so that the engine never waits for the next ones


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of the input: where it is in the file, and what it is known by.

    Attributes:
        custom_id: the client's.
        fingerprint: of what its answer depends on.
        digest: of the line as it was read.
        url: where it is to be sent.
        offset: of the line, in bytes.
        size: of the line, in bytes.
    """

    custom_id: str
    fingerprint: str
    digest: bytes
    url: str
    offset: int
    size: int


def read_batch(path: str | os.PathLike[str], context: str) -> list[BatchLine]:
    """The requests of a file; their bodies are only read when it is their turn.

    Args:
        path: the file.
        context: what else outputs depend on, such as the model; it goes into the fingerprints.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is no request, or two have one `custom_id`; names file and line.
    """
    name = os.fspath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"the batch file {name!r} is no regular file, and is read twice: save it to one")
    lines: list[BatchLine] = []
    sources: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            offset = 0
            for number, data in enumerate(file, 1):
                start, offset = offset, offset + len(data)
                if not data.strip():
                    continue
                line = _parse_line(f"{name}, line {number}", data, start, context)
                earlier = sources.setdefault(line.custom_id, number)
                if earlier != number:
                    raise RequestError(
                        f"{name}, line {number}: custom_id {line.custom_id!r} is that of line {earlier}, "
                        "too: they must be unique"
                    )
                lines.append(line)
    except OSError as error:
        raise ConfigError(f"cannot read the batch file {name!r} ({error.strerror})") from error
    if not lines:
        raise RequestError(
            f"{name}: the file is empty, or holds nothing but blank lines; give at least one request"
        )
    return lines


def _parse_line(source: str, data: bytes, offset: int, context: str) -> BatchLine:
    try:
        values = parse(data)
    except (ValueError, UnicodeDecodeError) as error:
        raise RequestError(f"{source}: no valid JSON ({error})") from error
    if not isinstance(values, dict) or set(values) != _KEYS:
        found = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise RequestError(
            f"{source}: must be an object of custom_id, method, url and body, not {shown(found)}"
        )
    custom_id, method, url = values["custom_id"], values["method"], values["url"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID:
        raise RequestError(
            f"{source}: custom_id must be text of 1 to {_MAX_ID} characters, not {shown(custom_id)}"
        )
    if method != "POST":
        raise RequestError(f"{source}: method must be POST, not {shown(method)}")
    if url not in URLS:
        raise RequestError(f"{source}: url={shown(url)} must be one of {', '.join(URLS)}")
    if not isinstance(values["body"], dict):
        raise RequestError(f"{source}: body must be an object, not {type(values['body']).__name__}")
    content = json.dumps([context, values], sort_keys=True).encode()
    fingerprint = hashlib.sha256(content).hexdigest()[:32]
    return BatchLine(custom_id, fingerprint, _digest(data), url, offset, len(data))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class BatchOutput(LineFile[str]):
    """The answers, by `custom_id`; their ids are the requests' fingerprints.

    Args and errors: as `LineFile`.
    """

    def __init__(self, path: str | os.PathLike[str], lines: Sequence[BatchLine], *, resume: bool) -> None:
        self._fingerprints = {line.custom_id: line.fingerprint for line in lines}
        super().__init__(path, resume=resume, line_start=_LINE_START)

    def write(self, answers: Sequence[tuple[BatchLine, int, bytes]]) -> None:
        """Append answers: the request, the status and the body.

        Raises:
            ConfigError: the disk is full or failed. Lines of earlier calls are kept.
        """
        written = b""
        for line, status, body in answers:
            answer = {
                "id": _PREFIX + line.fingerprint,
                "custom_id": line.custom_id,
                "response": {
                    "status_code": status,
                    "request_id": line.fingerprint,
                    "body": json.loads(body),
                },
                "error": None,
            }
            written += json.dumps(answer, allow_nan=False).encode("ascii") + b"\n"
        self._append(written)
        self._done.update(line.custom_id for line, _, _ in answers)

    def _check_line(self, number: int, line: bytes) -> str | None:
        try:
            content = json.loads(line)
            custom_id, found = content["custom_id"], content["id"]
            status = content["response"]["status_code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            self._refuse(number, "it is no line of jaxllm's")
        if not isinstance(custom_id, str) or custom_id not in self._fingerprints:
            self._refuse(number, f"no request has custom_id {shown(custom_id)}")
        if found != _PREFIX + self._fingerprints[custom_id]:
            if status != 200:
                return None
            self._refuse(number, f"the request {custom_id!r} was another, or of another model")
        return custom_id


def run_batch(
    service: Service,
    path: str | os.PathLike[str],
    lines: Sequence[BatchLine],
    output: BatchOutput,
    on_answers: Callable[[int], object],
) -> int:
    """Answer what has no answer yet.

    Args:
        service: the model; it is closed at the end.
        path: the file of the requests.
        lines: all of them.
        output: where answers go, and which are there.
        on_answers: told of how many there are more.

    Returns:
        How many were answered with an error.

    Raises:
        ConfigError: the output cannot be written.
        EngineError: the engine has failed.
    """
    todo = [line for line in lines if line.custom_id not in output.done]
    return asyncio.run(_run(service, path, todo, output, on_answers))


async def _run(
    service: Service,
    path: str | os.PathLike[str],
    todo: Sequence[BatchLine],
    output: BatchOutput,
    on_answers: Callable[[int], object],
) -> int:
    app = make_app(service)
    answers: asyncio.Queue[tuple[BatchLine, int, bytes] | BaseException] = asyncio.Queue()
    num_workers = min(len(todo), _ROUNDS * len(service.replicas) * service.core.limits.max_num_seqs)
    num_errors = num_answers = 0
    async with app.router.lifespan_context(app):
        with open(path, "rb") as file:
            pending = iter(todo)

            async def work() -> None:
                try:
                    for line in pending:
                        answers.put_nowait((line, *await _answer(app, file, line)))
                except Exception as failure:
                    answers.put_nowait(failure)

            with _cancelled([asyncio.create_task(work()) for _ in range(num_workers)]):
                while num_answers < len(todo):
                    found = [await answers.get()]
                    while not answers.empty():
                        found.append(answers.get_nowait())
                    written = [one for one in found if isinstance(one, tuple)]
                    await asyncio.to_thread(output.write, written)
                    num_answers += len(written)
                    num_errors += sum(status != 200 for _, status, _ in written)
                    on_answers(len(written))
                    for failed in found:
                        if isinstance(failed, BaseException):
                            raise failed
    return num_errors


async def _answer(app: Any, file: Any, line: BatchLine) -> tuple[int, bytes]:
    file.seek(line.offset)
    data = file.read(line.size)
    if _digest(data) != line.digest:
        raise ConfigError(
            f"the batch file was changed meanwhile: {line.custom_id!r} is not where it was; "
            "start again with a file that stays as it is"
        )
    body = parse(data)["body"]
    if body.get("stream"):
        message = "stream=true is for clients that read as it comes: leave it out of batch files"
        return 400, json.dumps(refused(message, "stream").body()).encode()
    status, content = await call(app, "POST", line.url, json.dumps(body).encode())
    if status > 500:  # of the engine; 500 is of this request alone
        raise EngineError(
            f"request {line.custom_id!r} failed, and nothing is written for it: {content.decode()}"
        )
    return status, content


@contextlib.contextmanager
def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> Iterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
