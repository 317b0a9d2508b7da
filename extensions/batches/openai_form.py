"""OpenAI's form of batches: what a client sends, what it is shown, and the lines of files with results."""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

import msgspec
from pydantic import Field

from penstock.api.http.bodies import Page
from penstock.extensions.batches.batch import BatchError, LineResult, Status, StoredBatch, StoredLine
from penstock.pipeline.protocol.params.common import Body, Metadata
from penstock.pipeline.protocol.params.files import ExpiresAfter
from penstock.pipeline.protocol.params.json_body import NO_JSON
from penstock.services.store.rows import to_json

WINDOW = 86_400.0
"""Seconds of the only window, ``24h``, in which the lines of a batch run."""

CHECKED = 1 << 20
"""The most bytes of an answer that is read again: what a proxy says instead of JSON is shorter."""

_UNRUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}
"""The code and the message of a line without an answer."""


class CreateBatch(Body):
    """A batch to make."""

    input_file_id: str = Field(min_length=1, max_length=512)
    """The file of the requests, one a line, which was uploaded with the purpose ``batch``."""
    endpoint: str = Field(max_length=200)
    """The path of all requests."""
    completion_window: Literal["24h"]
    """The time in which the requests run; those that are left then expire."""
    metadata: Metadata | None = None
    """Up to 16 values for the client itself."""
    output_expires_after: ExpiresAfter | None = None
    """The seconds after which the files of results are deleted."""


class RequestCounts(msgspec.Struct, frozen=True):
    """The counts of the lines of a batch."""

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    """The tokens of the input that the engine had in its cache."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """The tokens of the output that were thoughts."""

    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True):
    """The tokens of all lines of a batch."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchErrors(msgspec.Struct, frozen=True):
    """The mistakes in the input of a batch."""

    data: tuple[BatchError, ...]
    object: Literal["list"] = "list"


class BatchObject(msgspec.Struct, frozen=True):
    """A batch; its times are in seconds since 1970."""

    id: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    object: Literal["batch"] = "batch"

    @classmethod
    def of(cls, batch: StoredBatch) -> BatchObject:
        """Return a batch as OpenAI's clients read it."""
        one, whole = batch, _whole
        return cls(
            id=one.id,
            endpoint=one.endpoint,
            model=one.model or None,
            errors=BatchErrors(one.errors) if one.errors else None,
            input_file_id=one.input_file_id or "",
            completion_window=one.completion_window,
            status=one.status,
            output_file_id=one.output_file_id if one.has_ended else None,
            error_file_id=one.error_file_id if one.has_ended else None,
            created_at=int(one.created_at),
            in_progress_at=whole(one.in_progress_at),
            expires_at=whole(one.expires_at),
            finalizing_at=whole(one.finalizing_at),
            completed_at=whole(one.completed_at),
            failed_at=whole(one.failed_at),
            expired_at=whole(one.expired_at),
            cancelling_at=whole(one.cancelling_at),
            cancelled_at=whole(one.cancelled_at),
            request_counts=RequestCounts(one.total, completed=one.succeeded, failed=one.errored),
            usage=_usage(one),
            metadata=one.metadata,
        )


class BatchList(Page[BatchObject], frozen=True):
    """One page of a list of batches."""


class _Answer(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Problem(msgspec.Struct, frozen=True):
    code: str
    message: str


class _Line(msgspec.Struct, frozen=True):
    id: str
    custom_id: msgspec.Raw
    response: _Answer | None
    error: _Problem | None


def output_line(line: StoredLine, result: LineResult) -> bytes:
    """Return the line of a file of results, with its newline."""
    answer = error = None
    if result.kind in _UNRUN:
        error = _Problem(*_UNRUN[result.kind])
    else:
        answer = _Answer(result.status, request_id=result.request_id, body=msgspec.Raw(on_one_line(result.body)))
    name = f"batch_req_{sha256(line.id.encode()).hexdigest()[:32]}"
    custom_id = msgspec.Raw(to_json(line.custom_id).encode())
    return msgspec.json.encode(_Line(name, custom_id, answer, error)) + b"\n"


def on_one_line(body: bytes) -> bytes:
    """Return the JSON of an answer without line breaks, or a text for what is no JSON, as of a proxy in between."""
    if len(body) > CHECKED and b"\n" not in body and b"\r" not in body:
        return body
    try:
        body.decode()  # `format` does not check the texts
        return msgspec.json.format(body or b"null", indent=-1)
    except NO_JSON:
        return msgspec.json.encode(body.decode(errors="replace"))


def _usage(batch: StoredBatch) -> BatchUsage:
    return BatchUsage(
        batch.input_tokens,
        input_tokens_details=InputDetails(batch.cached_tokens),
        output_tokens=batch.output_tokens,
        output_tokens_details=OutputDetails(batch.reasoning_tokens),
        total_tokens=batch.input_tokens + batch.output_tokens,
    )


def _whole(at: float | None) -> int | None:
    return None if at is None else int(at)
