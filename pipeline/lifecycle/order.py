"""The order of a stream's events, whatever is in their items."""

from __future__ import annotations

import msgspec

from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.response import Response

OUTCOME = (
    *("output", "usage", "tool_usage", "error", "completed_at", "incomplete_details", "stop_reason"),
    *("input_messages", "output_messages", "generations"),
)
"""The fields of a response that are set only at its end."""


class StreamOrder:
    """The state machine for one stream: numbers without gaps, one item after another, and one end.

    A client has seen the fields that the request determines when the response was created, and the store repeats them.
    """

    def __init__(self) -> None:
        self._next_number = 0
        self._created: Response | None = None
        self._is_queued = False
        self._in_progress = False
        self._item_is_open = False
        self._ended = False

    def feed(self, event: events.ResponseEvent) -> None:
        """Take the next event of the stream; raise `InvariantBroken` if it is out of order."""
        if event.sequence_number == self._next_number and self._item_is_open and type(event) in events.DELTAS:
            self._next_number += 1  # nearly every event takes this path
            return
        rule(event.sequence_number == self._next_number, "sequence numbers count from 0 without gaps")
        self._next_number += 1
        rule(not self._ended, "nothing follows the terminal event")
        match event:
            case events.ResponseCreated() | events.ResponseQueued() | events.ResponseInProgress():
                rule(not self._in_progress, "nothing begins a response that is in progress")
                comes_first = isinstance(event, events.ResponseCreated)
                rule(comes_first != bool(self._created), "response.created comes first, and once")
                comes_again = self._is_queued and isinstance(event, events.ResponseQueued)
                rule(not comes_again, "response.queued comes once")
                self._created = self._created or event.response
                self._is_queued = isinstance(event, events.ResponseQueued)
                self._in_progress = isinstance(event, events.ResponseInProgress)
            case events.ResponseCompleted() | events.ResponseIncomplete() | events.ResponseFailed():
                rule(bool(self._created), "a response begins before it ends")
                is_same = _determined(event.response) == _determined(self._created)
                rule(is_same, "fields of a response that its request determines never change")
                rule(not self._item_is_open, "every item is done before the response ends")
                self._ended = True
            case events.OutputItemAdded():
                rule(self._in_progress, "items come after response.in_progress")
                rule(not self._item_is_open, "an item is done before the next is added")
                self._item_is_open = True
            case _:
                rule(self._item_is_open, "an event of an item comes between its added and its done event")
                self._item_is_open = not isinstance(event, events.OutputItemDone)

    def finish(self) -> None:
        """End the stream; raise `InvariantBroken` if no terminal event has come."""
        rule(self._ended, "a stream ends with a terminal event")


def _determined(response: Response | None) -> dict[str, object]:
    """Return the fields of a response that its request determines."""
    fields = msgspec.structs.asdict(response) if response else {}
    return {name: value for name, value in fields.items() if name not in ("status", *OUTCOME)}
