"""The rows of a timeline: turns and items, each with its tokens, its frames, and the events that those caused.

Nothing is left out, and nothing is in two rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from penstock.extensions.workbench.timeline.attribution import Channel, channel_of
from penstock.extensions.workbench.timeline.timeline import Timeline, is_served
from penstock.pipeline.frames import GenerationStarted, Opened, TokenChunk, TurnFinished
from penstock.pipeline.protocol.events import TerminalEvent

Kind: TypeAlias = Literal["start", "turn", "item", "end", "last"]

OPENED = get_args(Opened)


@dataclass
class Row:
    """The start or the end of the response or of a turn, or an item.

    ``tokens``, ``frames`` and ``events`` are indexes: of all generated tokens, of the frames of items, and of the
    events.  An ``opened`` frame belongs to an item.
    """

    kind: Kind
    turn: int
    opened: Any = None
    tokens: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    @property
    def channel(self) -> Channel:
        """The channel of the item's text."""
        return channel_of(self.opened) if self.opened else "markup"

    @property
    def title(self) -> str:
        """The kind of an item, and the tool, phase or recipient that it names."""
        if not self.opened:
            return ""
        fields = msgspec.structs.asdict(self.opened)
        kind = words(type(self.opened).__name__.removesuffix("Opened"))
        names = [str(fields[key]) for key in ("server_label", "namespace", "name") if fields.get(key)]
        name = ".".join(names) or str(fields.get("phase") or fields.get("recipient") or "").replace("_", " ")
        return " · ".join(filter(None, (kind, name, "by the program" if fields.get("caller") else "")))


def words(name: str) -> str:
    """Split the name of a class into words in lower case."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def rows_of(timeline: Timeline) -> list[Row]:
    """Return the rows of a timeline, in order."""
    rows = [Row("start", 0)]
    turn = 0
    for index, crossing in enumerate(timeline.items):
        frame = crossing.frame
        if isinstance(frame, GenerationStarted):
            turn += 1
            rows.append(Row("turn", turn))
        elif isinstance(frame, OPENED):
            rows.append(Row("item", turn, frame))
        elif isinstance(frame, TurnFinished):
            rows.append(Row("end", turn))
        rows[-1].frames.append(index)
    if not turn:
        turns = sum(isinstance(crossing.frame, GenerationStarted) for crossing in timeline.tokens)
        rows += [Row("turn", each + 1) for each in range(turns)]
    rows.append(Row("last", turn))
    _add_tokens(rows, timeline)
    _add_events(rows, timeline)
    return rows


def _add_events(rows: Sequence[Row], timeline: Timeline) -> None:
    row_of = {index: row for row in rows for index in row.frames}
    for index, event in enumerate(timeline.events):
        row = rows[0] if event.cause is None else row_of[event.cause]
        is_last = isinstance(event.frame, TerminalEvent) and row.kind == "item"
        (rows[-1] if is_last else row).events.append(index)


def _add_tokens(rows: Sequence[Row], timeline: Timeline) -> None:
    written = [row for row in rows if row.kind == "item" and row.turn and not is_served(row.opened)]
    turns = [row for row in rows if row.kind == "turn"] or [rows[0]]
    for index, (turn, _) in enumerate(turns_and_chunks(timeline)):
        item = timeline.attributed[index].item if timeline.attributed else None
        is_known = item is not None and item < len(written) and written[item].turn == turn
        row = written[item] if item is not None and is_known else turns[min(turn, len(turns)) - 1]
        row.tokens.append(index)


def turns_and_chunks(timeline: Timeline) -> list[tuple[int, int]]:
    """Return, for each generated token, its turn and the index of the frame that it came in."""
    places = []
    turn = 0
    for index, crossing in enumerate(timeline.tokens):
        turn += isinstance(crossing.frame, GenerationStarted)
        places += [(turn, index)] * (len(crossing.frame.token_ids) if isinstance(crossing.frame, TokenChunk) else 0)
    return places
