"""The files of `penstock batch`: requests and results, one in each line, as vLLM's ``run-batch`` has them."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryFile
from typing import IO, Any, Final, Literal

import msgspec

from penstock.api.http.bodies import ErrorBody, Problem
from penstock.api.http.errors import INVALID
from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.openai_form import on_one_line
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.protocol.params.json_body import NO_JSON, shortened

STANDARD: Final = "-"
"""The name of standard input, or of standard output."""

_URLS: Final = ("http://", "https://")


class _Sent(msgspec.Struct, gc=False):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Line(msgspec.Struct, frozen=True, gc=False):
    """A line of a file of requests; one that is wrong has a ``problem`` in place of a request."""

    id: str
    """The id of its result: a line that stays the same in the file keeps it."""
    custom_id: str = ""
    path: str = ""
    body: bytes = b""
    problem: str = ""


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response
    error: msgspec.Raw | None


class _Written(msgspec.Struct, gc=False):
    """The parts of a result that tell whose it is."""

    id: str
    error: Any = None


_sent: Final = msgspec.json.Decoder(_Sent)
_written: Final = msgspec.json.Decoder(_Written)
_encode: Final = msgspec.json.Encoder().encode


def refusal(problem: str) -> bytes:
    """Return the answer to a line that is wrong."""
    return _encode(ErrorBody(Problem(problem, INVALID, None, None)))


@contextmanager
def requests_file(name: str) -> Iterator[IO[bytes]]:
    """Open a file of requests for the length of a block; what comes from standard input is copied first.

    Raises `CannotRun` for a URL.
    """
    if name.startswith(_URLS):
        raise CannotRun(f"FILE is a URL: download it with curl -sSf {name} | penstock batch {STANDARD} ...")
    if name != STANDARD:
        with Path(name).open("rb") as file:
            yield file
        return
    with TemporaryFile() as copied:
        copyfileobj(sys.stdin.buffer, copied)
        copied.seek(0)
        yield copied


def lines_of(file: IO[bytes], most: int) -> Iterator[Line]:
    """Yield the lines of a file of requests that are not empty, from its start; each may have ``most`` bytes."""
    file.seek(0)
    seen, number = dict[str, int](), 0
    while text := file.readline(most + 1):
        number += 1
        if len(text) > most and not text.endswith(b"\n"):
            yield _wrong(text, number, f"it has over {most} bytes")
            while text and not text.endswith(b"\n"):
                text = file.readline(most)
        elif text := text.strip():
            yield _line(text, number, seen)


def _line(text: bytes, number: int, seen: dict[str, int]) -> Line:
    try:
        sent = _sent.decode(text)
    except NO_JSON as error:
        return _wrong(text, number, shortened(str(error), 200))
    if (first := seen.setdefault(sent.custom_id, number)) != number:
        return _wrong(text, number, f"line {first} has the same custom_id", sent.custom_id)
    if memoryview(sent.body)[0] != 0x7B:
        return _wrong(text, number, "the body is not an object", sent.custom_id)
    return Line(_id(text), sent.custom_id, sent.url, bytes(sent.body))


def _wrong(text: bytes, number: int, problem: str, custom_id: str = "") -> Line:
    """Return a line that is wrong; others may have the same text."""
    return Line(_id(b"%d %b" % (number, text)), custom_id, problem=f"Line {number}: {problem}.")


def _id(text: bytes) -> str:
    return f"batch_req_{blake2b(text, digest_size=12).hexdigest()}"


@dataclass
class Results:
    """The results of a run: those that were there before it, and those that it adds."""

    file: IO[bytes]
    done: set[str] = field(default_factory=set)
    """The ids of the lines that have a result."""
    failed: int = 0
    """The number of results that are errors."""

    def add(self, line: Line, answer: LineAnswer) -> None:
        """Write the answer to a line."""
        is_error = answer.has_failed or not 200 <= answer.status < 300
        body = msgspec.Raw(on_one_line(answer.body))
        response = _Response(answer.status, answer.request_id, None if is_error else body)
        self.file.write(_encode(_Result(line.id, line.custom_id, response, body if is_error else None)) + b"\n")
        self.file.flush()
        self.done.add(line.id)
        self.failed += is_error


@contextmanager
def results_file(name: str) -> Iterator[Results]:
    """Open a file for results for the length of a block, with those that it has; a torn last line is removed.

    Raises `CannotRun` for a URL, a file that another run writes, and one of something else.
    """
    if name.startswith(_URLS):
        raise CannotRun(f"OUT is a URL: write a file, and upload it with curl -T FILE {name}")
    if name == STANDARD:
        with _standard_output() as file:
            yield Results(file)
        return
    with Path(name).open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun(f"{name}: another penstock batch writes this file") from None
        results = Results(file)
        file.seek(0)
        _read(results, name)
        yield results


def _read(results: Results, name: str) -> None:
    """Read the results of a file, and remove what follows the last whole one."""
    end = 0
    for number, text in enumerate(results.file, 1):
        try:
            written = _written.decode(text)
        except NO_JSON as error:
            if text.endswith(b"\n"):
                raise CannotRun(f"{name}: line {number} is no result: name another file as OUT") from error
            results.file.truncate(end)
            return
        if not text.endswith(b"\n"):
            results.file.write(b"\n")
        end += len(text)
        results.done.add(written.id)
        results.failed += written.error is not None


@contextmanager
def _standard_output() -> Iterator[IO[bytes]]:
    """Give the results alone to standard output for the length of a block: all else goes to the log."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as file:
        os.dup2(2, 1)
        try:
            yield file
        finally:
            os.dup2(file.fileno(), 1)
