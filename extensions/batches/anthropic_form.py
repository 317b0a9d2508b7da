"""Batches in the form of Anthropic's API: the body that creates one, the batch, and the lines of its results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from penstock.extensions.batches.batch import LineResult, NewLine, StoredBatch, StoredLine
from penstock.extensions.batches.prefixes import prefix_of
from penstock.pipeline.errors import InvalidRequest, StageError
from penstock.pipeline.protocol.params.common import Body, Unused
from penstock.pipeline.protocol.params.json_body import NO_JSON, read_json
from penstock.pipeline.protocol.params.validation import read_body

MOST_REQUESTS: Final = 100_000
"""The most requests of a batch of Anthropic's API."""

MOST_ID: Final = 64
"""The most characters of a ``custom_id`` of Anthropic's API."""

OBJECTS: Final = 0
"""The number in the place of the objects of a list that are read one by one."""

PIECE: Final = 1 << 16
"""Bytes of a string that are read at once."""

_PATTERN: Final = "^[a-zA-Z0-9_-]{1,64}$"
_CUSTOM_ID: Final = re.compile(_PATTERN.strip("^$"))
_MARK: Final = re.compile(rb'["\[\]{}]')
"""The beginning of a string of JSON, or a bracket."""
_TEXT: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""The text of a string of JSON."""


class CreateMessageBatch(Body):
    """A request for a batch of messages."""

    required: ClassVar[str] = "requests"

    requests: Annotated[list[Any], Field(min_length=1)]
    """The requests for messages, each an object with a ``custom_id`` and the ``params`` of the message."""
    user_profile_id: Unused = None


class BatchedMessage(msgspec.Struct, frozen=True, gc=False):
    """A request for a message, as a batch has it; what is wrong in its ``params`` is found when it runs."""

    custom_id: str
    params: msgspec.Raw


class _Named(msgspec.Struct, frozen=True, gc=False):
    """The parts of the ``params`` that tell where a request runs, and beside which others."""

    model: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


class _Element(msgspec.Struct, frozen=True, gc=False):
    custom_id: Any = UNSET
    params: msgspec.Raw | UnsetType = UNSET


_element: Final = msgspec.json.Decoder(_Element)


def read_requests(body: bytes) -> list[BatchedMessage]:
    """Read the body of a request for a batch; raises `InvalidRequest` for the first wrong request in it.

    Each request is parsed alone, so that other threads compute between two of them.
    """
    rest, spans = _taken_out(body)
    if read_body(rest, CreateMessageBatch).requests != [OBJECTS] or not spans:
        raise _wrong("requests", "Input should be an array of objects")
    if len(spans) > MOST_REQUESTS:
        raise _wrong("requests", f"List should have at most {MOST_REQUESTS} items, not {len(spans)}")
    numbers, requests = dict[str, int](), list[BatchedMessage]()
    for number, (start, end) in enumerate(spans):
        request = _read(body[start:end], f"requests.{number}")
        if (first := numbers.setdefault(request.custom_id, number)) != number:
            message = f"{request.custom_id!r} is also that of requests.{first}: each must be unique in the batch"
            raise _wrong(f"requests.{number}.custom_id", message)
        requests.append(request)
    return requests


def _read(element: bytes, place: str) -> BatchedMessage:
    try:
        read = _decoded(element)
    except (*NO_JSON, StageError) as error:
        problem = str(error).removeprefix("JSON is malformed: ").removeprefix("The body is not valid JSON: ")
        raise _wrong(place, f"Input is not valid JSON: {problem}") from error
    match read.custom_id:
        case msgspec.UNSET:
            problem = "Field required"
        case str() as custom_id if not custom_id:
            problem = "String should have at least 1 character"
        case str() as custom_id if len(custom_id) > MOST_ID:
            problem = f"String should have at most {MOST_ID} characters"
        case str() as custom_id if not _CUSTOM_ID.fullmatch(custom_id):
            problem = f"String should match pattern '{_PATTERN}'"
        case str() as custom_id:
            if read.params is UNSET:
                raise _wrong(f"{place}.params", "Field required")
            if memoryview(read.params)[0] != 0x7B:
                raise _wrong(f"{place}.params", "Input should be an object")
            return BatchedMessage(custom_id, read.params)
        case _:
            problem = "Input should be a valid string"
    raise _wrong(f"{place}.custom_id", problem)


def _decoded(element: bytes) -> _Element:
    try:
        return _element.decode(element)
    except NO_JSON:  # such as half of a surrogate pair, which JavaScript may send
        return _element.decode(msgspec.json.encode(read_json(element)))


def _wrong(place: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{place}: {problem}", param=place, code="invalid_value")


def _taken_out(body: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return a body with `OBJECTS` in the place of the objects of its ``requests``, and where these begin and end.

    What else stands between the objects than commas stays in the body.
    """
    depth, name, is_listed, start, rest = 0, b"", False, 0, 0
    pieces, spans = list[bytes](), list[tuple[int, int]]()
    for at, after in _tokens(body):
        match body[at]:
            case 0x22:
                if depth == 1:
                    name = body[at:after]
            case 0x5B | 0x7B:
                if depth == 1:
                    is_listed = name == b'"requests"'
                elif depth == 2:
                    start = at
                depth += 1
            case closing:
                depth -= 1
                if depth == 2 and is_listed and closing == 0x7D and body[start] == 0x7B:
                    between = body[rest:start]
                    if not spans or between.strip() != b",":
                        pieces.append(b"%b%d" % (between, OBJECTS))
                    spans.append((start, after))
                    rest = after
    return b"".join([*pieces, body[rest:]]), spans


def _tokens(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each string of JSON begins and ends, and each bracket outside of strings."""
    after = 0
    while mark := _MARK.search(body, after):
        at = mark.start()
        after = _end_of_string(body, at + 1) if body[at] == 0x22 else at + 1
        yield at, after


def _end_of_string(body: bytes, at: int) -> int:
    """Return the end of a string whose text begins at a place; it is read piece by piece, so that other threads run."""
    while (end := _TEXT.match(body, at, at + PIECE).end()) > at:  # type: ignore[union-attr]
        at = end
    return at + 1


def line_of(request: BatchedMessage, number: int, served: Callable[[str | None], str | None]) -> NewLine:
    """Return a request as a line of its batch, given the function that names the model that is served for a name."""
    try:
        named = msgspec.json.decode(request.params, type=_Named)
    except NO_JSON:  # such as a number out of range, which its answer refuses
        named = _Named()
    model = served(named.model) if isinstance(named.model, str) else None
    parts = (model or "").encode(), bytes(named.tools), bytes(named.system), bytes(named.messages)
    return NewLine(
        number,
        custom_id=request.custom_id,
        body=bytes(request.params),
        model=model or "",
        prefix=prefix_of(parts),
    )


# What a client gets


class RequestCounts(msgspec.Struct, frozen=True):
    """The numbers of requests by their results; all are ``processing`` until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of messages."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None
    """The path of the results, which SDKs add to the URL of the server; None until the batch has ended."""
    archived_at: None = None
    type: Literal["message_batch"] = "message_batch"

    @classmethod
    def of(cls, batch: StoredBatch, results_url: str) -> MessageBatch:
        """Return a batch in Anthropic's form."""
        if batch.has_ended:
            counts = RequestCounts(
                succeeded=batch.succeeded, errored=batch.errored, canceled=batch.cancelled, expired=batch.expired
            )
        else:
            counts = RequestCounts(processing=batch.total)
        running: Literal["in_progress", "canceling"] = "in_progress" if batch.cancelling_at is None else "canceling"
        return cls(
            id=batch.id,
            processing_status="ended" if batch.has_ended else running,
            request_counts=counts,
            created_at=_iso(batch.created_at),
            expires_at=_iso(batch.expires_at),
            ended_at=None if batch.ended_at is None else _iso(batch.ended_at),
            cancel_initiated_at=None if batch.cancelling_at is None else _iso(batch.cancelling_at),
            results_url=results_url if batch.has_ended else None,
        )


class MessageBatchList(msgspec.Struct, frozen=True):
    """One page of a list of batches of messages."""

    data: tuple[MessageBatch, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(msgspec.Struct, frozen=True):
    """The confirmation that a batch was deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class _Result(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["succeeded", "errored", "canceled", "expired"] | UnsetType = UNSET
    message: msgspec.Raw | UnsetType = UNSET
    error: msgspec.Raw | UnsetType = UNSET


class MessageBatchIndividualResponse(msgspec.Struct, frozen=True):
    """A line of the results."""

    custom_id: str
    result: _Result


def result_lines(results: Sequence[tuple[StoredLine, LineResult]]) -> bytes:
    """Return the lines of some results."""
    return b"".join(_result_line(line.custom_id, result) for line, result in results)


def _result_line(custom_id: str, result: LineResult) -> bytes:
    body = msgspec.Raw(result.body)
    match result.kind:
        case "succeeded":
            written = _Result("succeeded", message=body)
        case "errored":
            written = _Result("errored", error=body)
        case "cancelled":
            written = _Result("canceled")
        case "expired":
            written = _Result("expired")
    return msgspec.json.encode(MessageBatchIndividualResponse(custom_id, written)) + b"\n"


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
