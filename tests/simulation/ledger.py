"""The record of what the clients of a simulation have seen: accepted responses, and all that was read of them."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.program_watch import KnownProgram

DONE = b"data: [DONE]\n\n"

ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})

_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Violation(AssertionError):
    """A promise that the servers did not keep."""


@dataclass
class Reading:
    """One reader of a stream: the events that it got after number ``after``, over one connection."""

    after: int
    frames: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    """True if the stream has ended as it should."""
    _rest: bytes = b""

    @property
    def last(self) -> int:
        """The sequence number of the last event that it got."""
        return number_of(self.frames[-1]) if self.frames else self.after

    @property
    def has_ended(self) -> bool:
        """True if it got a terminal event."""
        return bool(self.frames) and is_terminal(self.frames[-1])

    @property
    def is_refusal(self) -> bool:
        """True if it got an error in place of a response, after signs of life."""
        return bool(self.frames) and self.frames[0].startswith(b"event: error\n")

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream."""
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            if frame + b"\n\n" == DONE:
                self.is_whole = True
            elif frame.startswith(b"event: "):
                self.take(frame + b"\n\n")
            elif not frame.startswith(b":"):
                raise Violation(f"a stream has a frame {frame!r}")

    def take(self, frame: bytes) -> None:
        """Take an event; raise `Violation` if it does not follow the one before."""
        if self.has_ended:
            raise Violation(f"an event follows a terminal event: {frame!r}")
        number = number_of(frame)
        if number != self.last + 1 and not (self.after >= number and is_terminal(frame)):
            raise Violation(f"event {number} follows event {self.last}: {frame[:200]!r}")
        self.frames.append(frame)


@dataclass
class Known:
    """A response that a server has accepted: a client has its id."""

    id: str
    owner: str
    mode: str
    is_stored: bool
    wanted: dict[str, Any]
    """The metadata of its request, which the engine obeys."""
    at: float
    """The time at which a client had its id."""
    readings: list[Reading] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Every copy of the response that a client has got after its end."""
    cancelled: bool = False
    """True if a client has tried to cancel it, or its own client has left."""
    deleting: bool = False
    """True if a client has tried to delete it."""
    deleted: bool = False

    @property
    def has_ended(self) -> bool:
        """True if a client has got its end."""
        return bool(self.answers) or any(reading.has_ended for reading in self.readings)

    def reading(self, after: int = -1) -> Reading:
        """Begin a reading of its stream."""
        made = Reading(after)
        self.readings.append(made)
        return made

    def take(self, answer: dict[str, Any]) -> None:
        """Take a copy of it that a client has got."""
        if answer["id"] != self.id:
            raise Violation(f"{answer['id']} was answered in place of {self.id}")
        if answer["status"] in ENDED:
            self.answers.append(answer)


@dataclass
class KnownFile:
    """A file that a server has stored for a client."""

    id: str
    owner: str
    data: bytes
    deleting: bool = False
    deleted: bool = False
    """True if a client has tried to delete it, and if a server has done so."""


class Sum(NamedTuple):
    """What answers have used together."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    @classmethod
    def of_response(cls, response: Any) -> Sum:
        """Return what a response says that it has used."""
        if (usage := response["usage"]) is None:
            return cls(1)
        cached = usage["input_tokens_details"]["cached_tokens"]
        reasoning = usage["output_tokens_details"]["reasoning_tokens"]
        return cls(1, usage["input_tokens"], cached, usage["output_tokens"], reasoning)

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(*(mine + its for mine, its in zip(self, other, strict=True)))


class LineEnd(NamedTuple):
    """The result of a line of a batch, as a client has read it."""

    custom_id: str
    kind: str
    text: str = ""
    """The answer, or the error."""
    used: Sum = Sum()


@dataclass
class KnownBatch:
    """A batch that a server has created for a client."""

    id: str
    owner: str
    api: str
    lines: dict[str, dict[str, Any]]
    """What the engine shall do for each line; nothing for lines that are wrong."""
    ends: list[dict[str, Any]] = field(default_factory=list)
    """Every copy of the batch that a client has got after its end."""
    used: Sum = field(default_factory=Sum)
    """What its results say that they have used."""
    cancelling: bool = False
    """True if a client has tried to cancel it."""
    cancelled_at: float | None = None
    """The time at which its cancel was answered."""
    deleting: bool = False
    deleted: bool = False


class Admitted(NamedTuple):
    """A request that counts against the rate of its owner, with the times of its beginning and its answer."""

    owner: str
    sent: float
    answered: float


@dataclass
class Ledger:
    """All that the clients have seen."""

    responses: dict[str, Known] = field(default_factory=dict)
    conversations: dict[str, str] = field(default_factory=dict)
    """The owner of each conversation."""
    refused: set[str] = field(default_factory=set)
    """The nonces of requests that a server has refused."""
    others: Counter[str] = field(default_factory=Counter)
    """The requests of each owner for answers that are not stored, or that delete one."""
    batches: dict[str, KnownBatch] = field(default_factory=dict)
    files: dict[str, KnownFile] = field(default_factory=dict)
    programs: list[KnownProgram] = field(default_factory=list)
    attempts: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """The requests of each program, by its nonce, for each of its rounds."""
    sent: Counter[str] = field(default_factory=Counter)
    """The requests of each owner that count against its rate, answered or not."""
    admitted: list[Admitted] = field(default_factory=list)
    """Those that were not refused."""

    def add(self, known: Known) -> Known:
        """Add an accepted response."""
        if known.id in self.responses:
            raise Violation(f"{known.id} was accepted twice")
        self.responses[known.id] = known
        return known


def number_of(frame: bytes) -> int:
    """Return the sequence number of an event, which is the first or the last field of that name."""
    data = json.loads(frame.partition(b"data: ")[2])
    return int(data["sequence_number"])


def is_terminal(frame: bytes) -> bool:
    """Return True for a terminal event."""
    kind = frame[len(b"event: ") : frame.index(b"\n")]
    return kind in (b"response.completed", b"response.incomplete", b"response.failed")


def response_of(frame: bytes) -> dict[str, Any]:
    """Return the response of an event that has one."""
    response: dict[str, Any] = json.loads(frame.partition(b"data: ")[2])["response"]
    return response


def renumbered(frame: bytes, number: int) -> bytes:
    """Return an event under another number."""
    return _NUMBER.sub(b'"sequence_number":%d' % number, frame, count=1)
