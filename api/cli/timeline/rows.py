"""The rows of a timeline: turns and items, each with its tokens, its frames, and the events that those caused.

Nothing is left out, and nothing is in two rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from penstock.api.cli.timeline.attribution import AttributedToken, Channel, channel_of
from penstock.api.cli.timeline.timeline import SERVED, Timeline
from penstock.pipeline.frames import GenerationStarted, ItemClosed, Opened, TokenChunk, TurnFinished
from penstock.pipeline.protocol.events import TerminalEvent

Kind: TypeAlias = Literal["start", "turn", "item", "end", "last"]

OPENED = get_args(Opened)

CLOSING = re.compile(rb"end|return|call|eot|eom|/", re.IGNORECASE)
"""Matches the special tokens that end an item."""


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
        whom = ".".join(names) or str(fields.get("phase") or fields.get("recipient") or "").replace("_", " ")
        return f"{kind} · {whom}" if whom else kind


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
    """Add each token, markup included, to the row of its item; in a turn without items, to the row of the turn."""
    written = [row for row in rows if row.kind == "item" and row.turn and not isinstance(row.opened, SERVED)]
    at, latest = 0, 0
    for index, (turn, _) in enumerate(turns_and_chunks(timeline)):
        if not timeline.attributed:
            _turn_row(rows, turn).tokens.append(index)
            continue
        token = timeline.attributed[index]
        if turn != latest:
            latest = turn
            at = next((at for at, row in enumerate(written) if row.turn == turn), len(written))
        if token.item is not None and token.item < len(written):
            at = token.item
        else:
            while at + 1 < len(written) and written[at + 1].turn == turn and _is_after(token, written[at], timeline):
                at += 1
        row = written[at] if at < len(written) and written[at].turn == turn else _turn_row(rows, turn)
        row.tokens.append(index)


def turns_and_chunks(timeline: Timeline) -> list[tuple[int, int]]:
    """Return, for each generated token, its turn and the index of the frame that it came in."""
    places = []
    turn = 0
    for index, crossing in enumerate(timeline.tokens):
        turn += isinstance(crossing.frame, GenerationStarted)
        places += [(turn, index)] * (len(crossing.frame.token_ids) if isinstance(crossing.frame, TokenChunk) else 0)
    return places


def _turn_row(rows: Sequence[Row], turn: int) -> Row:
    turns = [row for row in rows if row.kind == "turn"]
    return turns[min(turn, len(turns)) - 1] if turns else rows[0]


def _is_after(token: AttributedToken, row: Row, timeline: Timeline) -> bool:
    """True if a token of markup comes after the end of an item.

    That is after the item's closing token, or at the token that begins the next item if the closing one is missing.
    """
    closed = timeline.items[row.frames[-1]]
    if closed.cause is None or token.frame < closed.cause:
        return False
    if token.frame > closed.cause:
        return True
    last = timeline.attributed[row.tokens[-1]] if row.tokens else None
    if last and last.frame == closed.cause and last.is_mark and CLOSING.search(last.written):
        return True
    repairs = closed.frame.repairs if isinstance(closed.frame, ItemClosed) else ()
    return token.is_mark and not CLOSING.search(token.written) and "missing end" in repairs
