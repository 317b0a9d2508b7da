"""A batch and its lines, as the store has them; both APIs show them in forms of their own."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.services.use import Use

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Kind: TypeAlias = Literal["succeeded", "errored", "cancelled", "expired"]

ENDED: Final[frozenset[str]] = frozenset({"failed", "completed", "expired", "cancelled"})
"""The statuses of a batch that changes no more."""


class BatchError(msgspec.Struct, frozen=True):
    """A mistake in the input of a batch; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch without its lines; times are in seconds since 1970, and None until they come.

    A batch of OpenAI's API has its results in files at its end, and then no lines any more.  One of Anthropic's API
    keeps its lines with their results.
    """

    id: str
    owner: str
    api: Literal["openai", "anthropic"]
    endpoint: str
    """The path to which each line is a request, such as ``/v1/chat/completions``."""
    model: str = ""
    """The model of all lines as the client names it; empty if it is not known, or if they have several."""
    status: Status = "validating"
    created_at: float
    expires_at: float
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    total: int = 0
    succeeded: int = 0
    errored: int = 0
    expired: int = 0
    cancelled: int = 0
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    errors: tuple[BatchError, ...] = ()
    output_expires_after: int | None = None
    """Seconds after their creation for which the files of results are kept; None if they stay."""
    key_name: str = ""
    team: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def has_ended(self) -> bool:
        """True once it changes no more."""
        return self.status in ENDED

    @property
    def ended_at(self) -> float | None:
        """The time of its end; None before it."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at


class NewLine(NamedTuple):
    """A line that a batch begins with."""

    number: int
    """Its number in the input, from 1."""
    custom_id: str
    body: bytes
    """The JSON of the request alone."""
    model: str = ""
    """The name of a model that is served here; empty if any server may answer the line, such as with an error."""
    prefix: str = ""
    """Lines that share a prefix have texts here that sort together: they run together."""


class StoredLine(NamedTuple):
    """A line of a batch, without its request."""

    batch_id: str
    number: int
    custom_id: str

    @property
    def id(self) -> str:
        """The id by which what the line uses is counted once."""
        return f"{self.batch_id}:{self.number}"


class LineResult(msgspec.Struct, frozen=True):
    """The one result of a line."""

    kind: Kind
    status: int = 0
    """The status of the answer, as HTTP has it; 0 if the line did not run."""
    request_id: str = ""
    body: bytes = b""
    """The JSON of the answer; empty if the line did not run."""


class LineAnswer(msgspec.Struct, frozen=True):
    """The answer to a line, as HTTP would have given it, and what it has used; the ``use`` has the id of the line."""

    status: int
    body: bytes
    request_id: str
    use: Use | None = None
    has_failed: bool = False
    """True if a response has failed, also one that HTTP gives with status 200."""
    may_pass: bool = False
    """True for an error that may be over if the line runs again, such as that of an engine that is down."""
