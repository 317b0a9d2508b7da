"""Steering on a connection: new input for responses that run, and the responses that go on with it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import RequestFacts
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.items import OutputItem
from penstock.pipeline.protocol.params.items import message
from penstock.pipeline.protocol.params.request import CreateResponse, SteerResponse
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.response import ResponseStatus
from penstock.services.runs.run import Run

MOST_PENDING = 16
"""The most steering inputs that a connection keeps for one response."""

MOST_ENDED = 256
"""The most ended responses whose status a connection remembers."""

SteerErrorCode: TypeAlias = Literal[
    "response_not_found",
    "invalid_input",
    "steering_not_supported",
    "too_many_pending_steers",
    "response_already_completed",
    "response_not_active",
    "successor_creation_failed",
]


class SteerRefused(Exception):
    """Input cannot steer a response."""

    def __init__(self, code: SteerErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: SteerErrorCode = code


class _Submission(msgspec.Struct, frozen=True):
    id: str
    previous_response_id: str


class _Returned(msgspec.Struct, frozen=True):
    """Input that goes back to the client; it has an id if it was accepted before."""

    previous_response_id: str
    input: msgspec.Raw
    id: str | UnsetType = UNSET


class _Problem(msgspec.Struct, frozen=True):
    code: SteerErrorCode
    message: str
    type: Literal["invalid_request_error"] = "invalid_request_error"


class SteerAccepted(msgspec.Struct, frozen=True, tag_field="type", tag="response.steer.accepted"):
    """The server keeps the input until a successor has begun with it."""

    sequence_number: int
    steer: _Submission


class SteerPending(msgspec.Struct, frozen=True, tag_field="type", tag="response.steer.pending"):
    """The input waits for a request of the client, which has to bring ``required_input``."""

    sequence_number: int
    steer: _Submission
    required_input: tuple[dict[str, Any], ...]
    reason: Literal["waiting_for_required_input"] = "waiting_for_required_input"


class SteerFailed(msgspec.Struct, frozen=True, tag_field="type", tag="response.steer.failed"):
    """The input was refused, or no successor could begin with it."""

    sequence_number: int
    steer: _Returned
    error: _Problem


SteerEvent: TypeAlias = SteerAccepted | SteerPending | SteerFailed


@dataclass(frozen=True)
class SentInput:
    """Input that a client has sent for a response: its messages, or the problem that it has."""

    previous: str
    """The id of the response."""
    sent: msgspec.Raw
    """The input as the client sent it."""
    size: int
    """The bytes of its event."""
    messages: Sequence[items.Message] = ()
    problem: str = ""


@dataclass(frozen=True)
class Steer:
    """Input that was accepted."""

    id: str
    input: SentInput


def read_input(frame: bytes, previous: object, sent: msgspec.Raw) -> SentInput:
    """Read an event that steers, whose fields ``previous_response_id`` and ``input`` are given.

    Raises `InvalidRequest` for an event that names no response.
    """
    if not isinstance(previous, str):
        raise InvalidRequest(
            "Field required (at previous_response_id)", param="previous_response_id", code="missing_required_parameter"
        )
    try:
        given = read_body(frame, SteerResponse).input
    except InvalidRequest as error:
        return SentInput(previous, sent, len(frame), problem=error.message)
    if not given:
        return SentInput(previous, sent, len(frame), problem="There is no message (at input)")
    if isinstance(given, str):
        return SentInput(previous, sent, len(frame), [message("user", given)])
    return SentInput(previous, sent, len(frame), given)


@dataclass
class _Target:
    """A response that runs, or that waits for input of its client: then ``run`` is None."""

    lane: str | None
    run: Run | None
    is_steerable: bool
    steers: list[Steer] = field(default_factory=list)


@dataclass
class Steers:
    """State machine, one per connection: it decides what becomes of each input, and writes the events about it.

    The input that it keeps has ``most_bytes``.
    """

    most_bytes: int
    _targets: dict[str, _Target] = field(default_factory=dict)
    """By response id."""
    _ended: deque[tuple[str, ResponseStatus]] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    _sequence_number: int = 0

    def begin(self, lane: str | None, run: Run, facts: RequestFacts) -> None:
        """Take note of a response that has begun."""
        is_steerable = facts.purpose.compacting is None and not facts.response.conversation and facts.purpose.generates
        self._targets[run.response.id] = _Target(lane, run, is_steerable)

    def take(self, given: SentInput) -> tuple[str | None, SteerAccepted | SteerFailed]:
        """Take input of the client; return the lane of its response, and the event that answers it."""
        target = self._targets.get(given.previous)
        lane = target.lane if target else None
        try:
            steer = self._accepted(given, target)
        except SteerRefused as refused:
            problem = _Problem(refused.code, str(refused))
            return lane, SteerFailed(self._next(), _Returned(given.previous, given.sent), problem)
        return lane, SteerAccepted(self._next(), _Submission(steer.id, given.previous))

    def _accepted(self, given: SentInput, target: _Target | None) -> Steer:
        """Keep valid input for its response, which shall now end; raise `SteerRefused` for any other."""
        if target is None or target.run is None:
            raise self._inactive(given.previous)
        if not target.is_steerable:
            message = "A response in a conversation, with compaction or without output cannot be steered."
            raise SteerRefused("steering_not_supported", message)
        kept = sum(steer.input.size for each in self._targets.values() for steer in each.steers)
        if len(target.steers) >= MOST_PENDING or kept + given.size > self.most_bytes:
            raise SteerRefused("too_many_pending_steers", "Too much input waits for a successor.")
        if given.problem:
            raise SteerRefused("invalid_input", given.problem)
        steer = Steer(f"steer_{secrets.token_hex(16)}", given)
        target.steers.append(steer)
        target.run.is_steered = True
        return steer

    def _inactive(self, response_id: str) -> SteerRefused:
        status = dict(self._ended).get(response_id)
        if status is None:
            return SteerRefused("response_not_found", "This connection runs no such response.")
        if status == "completed":
            return SteerRefused("response_already_completed", "The response is completed.")
        return SteerRefused("response_not_active", f"The response is {status}.")

    def end(self, run: Run) -> tuple[list[Steer], list[SteerEvent]]:
        """Take note of the end of a response; return the input that its successor begins with, and events to send."""
        target = self._targets.pop(run.response.id)
        self._ended.append((run.response.id, run.response.status))
        if not target.steers:
            return [], []
        if run.response.status not in ("completed", "incomplete"):
            return [], self.fail(target.steers, f"The response is {run.response.status}.")
        required = tuple(required_input(run.response.output))
        if not required:
            return target.steers, []
        target.run = None
        self._targets[run.response.id] = target
        return [], [
            SteerPending(self._next(), _Submission(steer.id, run.response.id), required) for steer in target.steers
        ]

    def lose(self, lane: str | None) -> list[Steer]:
        """Return the input for the running response of a lane, which has ended without a last event."""
        lost = [name for name, target in self._targets.items() if target.run and target.lane == lane]
        return [steer for name in lost for steer in self._targets.pop(name).steers]

    def continue_(self, lane: str | None, previous: str | None) -> tuple[list[Steer], list[SteerEvent]]:
        """Return the input that a request of the client in this lane brings along, and events about all other."""
        waiting = [(name, each) for name, each in self._targets.items() if each.run is None and each.lane == lane]
        taken: list[Steer] = []
        events: list[SteerEvent] = []
        for name, target in waiting:
            del self._targets[name]
            if name == previous:
                taken = target.steers
            else:
                events += self.fail(target.steers, "Its lane went on without it.", "response_not_active")
        return taken, events

    def fail(
        self, steers: Sequence[Steer], message: str, code: SteerErrorCode = "successor_creation_failed"
    ) -> list[SteerEvent]:
        """Return the events that give input back."""
        return [
            SteerFailed(
                self._next(),
                _Returned(steer.input.previous, steer.input.sent, steer.id),
                _Problem(code, message),
            )
            for steer in steers
        ]

    def _next(self) -> int:
        self._sequence_number += 1
        return self._sequence_number - 1


def with_input(request: CreateResponse, steers: Sequence[Steer]) -> CreateResponse:
    """Return a request with the input of ``steers`` before its own."""
    messages = [message for steer in steers for message in steer.input.messages]
    return request.model_copy(update={"input": [*messages, *request.input_items]}) if messages else request


def successor(request: CreateResponse) -> CreateResponse:
    """Return a request with the same settings, without input."""
    bare = request.model_copy(update={"input": None, "previous_input_messages": None})
    return bare.inside(replace(request.envelope, body=b""))


def required_input(output: Sequence[OutputItem]) -> Iterator[dict[str, Any]]:
    """Yield what the client has to bring before the model can go on: an item for each of its calls, to be completed."""
    for item in output:
        match item:
            case items.McpApprovalRequest():
                yield {"type": "mcp_approval_response", "approval_request_id": item.id}
            case items.FunctionCall(is_async=True) | items.ShellCall(runs_here=True):
                pass
            case items.FunctionCall(status="completed", call_id=call_id, name=name):
                yield {"type": "function_call_output", "call_id": call_id, "name": name}
            case items.LocalShellCall(status="completed", call_id=call_id):
                yield {"type": "function_call_output", "call_id": call_id, "name": "local_shell"}
            case items.CustomToolCall() | items.ShellCall() | items.ApplyPatchCall() if item.status == "completed":
                yield {"type": f"{item.type}_output", "call_id": item.call_id}
            case _:
                pass
