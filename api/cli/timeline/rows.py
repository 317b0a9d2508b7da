"""The rows of a timeline: frames in the order of their causes, with tokens of the same item grouped.

Nothing is left out.  Each token is in one row, unless a stage has rewritten the text of its item.  Each event is in one
row as well; consecutive deltas are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any, Literal, TypeAlias

from penstock.api.cli.story import SERVED, Crossing, Junction, Story
from penstock.pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    Prompt,
    ResolvedRequest,
    ResponseStarted,
    TokenChunk,
    TurnFinished,
)
from penstock.pipeline.protocol.events import DELTAS, Event
from penstock.pipeline.recordings.token_places import BORDERS, OPENINGS, Channel, Token, channel_of

Kind: TypeAlias = Literal["begin", "markup", "open", "text", "close", "tool", "finish", "more"]

LONG = 5
"""A gap is highlighted if it is at least this many times as long as the median gap,"""
FELT = 0.05
"""and at least this many seconds."""


@dataclass
class Row:
    """A row of the timeline, from ``at`` to ``until`` in seconds: its ``frame``, and the ``events`` that it caused.

    ``text`` is the text of the item if its tokens are not known, or if the text was rewritten.
    """

    kind: Kind
    at: float | None
    channel: Channel = "markup"
    item: int | None = None
    frame: Any = None
    until: float | None = None
    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Fold:
    """A run of events with the same name; ``first`` and ``last`` are sequence numbers."""

    name: str
    first: int
    last: int
    count: int


def folded(events: Sequence[Event]) -> Iterator[Fold]:
    """Yield events, with consecutive deltas of one type as a single fold."""
    at = 0
    while at < len(events):
        end = at + 1
        while end < len(events) and type(events[at]) in DELTAS and type(events[end]) is type(events[at]):
            end += 1
        name = str(events[at].__struct_config__.tag)
        yield Fold(name, events[at].sequence_number, events[end - 1].sequence_number, end - at)
        at = end


def rows_of(story: Story) -> list[Row]:
    """Return all rows of a story."""
    kinds = [_kind(junction) for junction in story.junctions]
    # of several junctions of the same kind, only the last is shown
    shown = ["" if kind in kinds[place + 1 :] else kind for place, kind in enumerate(kinds)]
    rows = _Rows(long_gap(story), rewritten(story), knows_tokens=bool(story.tokens), knows_items="items" in kinds)
    for beat in _Beats(story, shown).all():
        rows.add(beat)
    return rows.rows


def rewritten(story: Story) -> frozenset[int]:
    """Return the indexes of the items whose text differs from the text that the parser read from their tokens."""
    items = next((each.crossings for each in reversed(story.junctions) if _kind(each) == "items"), ())
    texts = zip_longest(_texts(story.behind("parse")), _texts(items))
    return frozenset(number for number, (parsed, shown) in enumerate(texts) if parsed != shown)


def _texts(crossings: Sequence[Crossing]) -> list[str]:
    """Return the text of each item that the model wrote; calls before its first turn do not count."""
    texts: list[list[str]] = []
    has_begun = False
    for crossing in crossings:
        has_begun = has_begun or isinstance(crossing.frame, GenerationStarted)
        if has_begun and isinstance(crossing.frame, OPENINGS):
            texts.append([])
        elif texts and isinstance(crossing.frame, ItemDelta):
            texts[-1].append(crossing.frame.text)
    return ["".join(pieces) for pieces in texts]


def long_gap(story: Story) -> float:
    """Return the minimum length in seconds of a highlighted gap."""
    times = [crossing.at for crossing in story.behind("generate") if crossing.at is not None]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max(FELT, LONG * median(gaps)) if gaps else FELT


def _kind(junction: Junction) -> str:
    """Return the kind of a junction's frames, which is empty for conversations and prompts."""
    frames = [crossing.frame for crossing in junction.crossings]
    if any(isinstance(frame, Event) for frame in frames):
        return "events"
    if junction.stage == "generate" or any(isinstance(frame, (TokenChunk, GenerationFinished)) for frame in frames):
        return "tokens"
    return "" if any(isinstance(frame, (ResolvedRequest, Prompt)) for frame in frames) else "items"


@dataclass(frozen=True)
class _Beat:
    """A frame that is shown, or one of its tokens."""

    kind: str
    at: float | None
    frame: Any
    token: Token | None = None


class _Beats:
    """Walks the frames of a story depth first: each frame, then all that it caused, then the next frame."""

    def __init__(self, story: Story, kinds: Sequence[str]) -> None:
        self._junctions = story.junctions
        self._kinds = kinds
        self._next = [0] * len(story.junctions)
        self._tokens: dict[int, list[Token]] = {}
        for token in story.tokens:
            self._tokens.setdefault(token.frame, []).append(token)

    def all(self) -> Iterator[_Beat]:
        for level in range(len(self._junctions)):  # frames without a cause come last
            yield from self._below(level, None)

    def _below(self, level: int, cause: int | None) -> Iterator[_Beat]:
        """Yield the frames caused by that frame of the previous junction, each followed by the frames it caused."""
        if level == len(self._junctions):
            return
        crossings = self._junctions[level].crossings
        while (at := self._next[level]) < len(crossings) and _is_due(crossings[at].cause, cause):
            self._next[level] += 1
            yield from self._from(level, at, crossings[at])

    def _from(self, level: int, index: int, crossing: Crossing) -> Iterator[_Beat]:
        kind, below = self._kinds[level], self._below(level + 1, index)
        tokens = self._tokens.get(index, ()) if isinstance(crossing.frame, TokenChunk) else ()
        if kind and tokens:
            yield from _interleaved(crossing, tokens, list(below))
            return
        if kind:
            yield _Beat(kind, crossing.at, crossing.frame)
        yield from below


def _interleaved(chunk: Crossing, tokens: Sequence[Token], beats: list[_Beat]) -> Iterator[_Beat]:
    """Yield the tokens of a chunk, each before the items that open or close at it, and all else the chunk caused."""
    beats.reverse()
    for token in tokens:
        missing = token.borders
        while missing and beats and not isinstance(beats[-1].frame, BORDERS):
            yield beats.pop()
        yield _Beat("tokens", chunk.at, chunk.frame, token)
        while beats and token.borders and (missing or isinstance(beats[-1].frame, Event)):
            missing -= isinstance(beats[-1].frame, BORDERS)
            yield beats.pop()
    yield from reversed(beats)


def _is_due(cause: int | None, latest: int | None) -> bool:
    return cause is None or latest is None or cause <= latest


class _Rows:
    """Turns beats into rows.  For a rewritten item, the new text is shown instead of the tokens."""

    def __init__(self, long_gap: float, rewritten: frozenset[int], *, knows_tokens: bool, knows_items: bool) -> None:
        self.rows: list[Row] = []
        self._long_gap = long_gap
        self._rewritten = rewritten
        self._knows_tokens = knows_tokens
        self._knows_items = knows_items
        self._row = Row("more", None)
        self._items = -1
        self._has_begun = False
        self._channel: Channel = "markup"

    def add(self, beat: _Beat) -> None:
        """Add the next beat."""
        self._has_begun = self._has_begun or isinstance(beat.frame, GenerationStarted)
        match beat.frame:
            case _ if beat.token:
                self._add_token(beat, beat.token)
            case Event():
                self._add_event(beat)
            case TokenChunk() | GenerationStarted() | GenerationFinished() if (
                beat.kind == "tokens" and self._knows_items
            ):
                pass
            case ItemDelta():
                self._add_text(beat)
            case ItemClosed():
                self._border("close", beat)
                self._channel = "markup"
            case frame if isinstance(frame, (*OPENINGS, *SERVED)):
                self._open(beat)
            case frame:
                self._begin(Row(_kind_of(frame), beat.at, frame=frame))

    def _begin(self, row: Row) -> Row:
        self._row = row
        self.rows.append(row)
        return row

    def _add_token(self, beat: _Beat, token: Token) -> None:
        if token.item in self._rewritten:
            return
        kind: Kind = "markup" if token.item is None else "text"
        row = self._row = self.rows[-1] if self.rows else self._row
        if (row.kind, row.item) != (kind, token.item) or row.frame or self._stands_out(row, beat.at):
            row = self._begin(Row(kind, beat.at, token.channel, token.item))
        row.tokens.append(token)
        row.until = beat.at

    def _stands_out(self, row: Row, at: float | None) -> bool:
        return at is not None and row.until is not None and at - row.until >= self._long_gap

    def _add_event(self, beat: _Beat) -> None:
        if not self.rows:
            self._begin(Row("more", beat.at))
        self._row.events.append(beat.frame)

    def _add_text(self, beat: _Beat) -> None:
        if self._knows_tokens and self._items not in self._rewritten:
            return
        if self._row.kind != "text" or self._stands_out(self._row, beat.at):
            self._begin(Row("text", beat.at, self._channel))
        self._row.text += beat.frame.text
        self._row.until = beat.at

    def _open(self, beat: _Beat) -> None:
        """Begin an item.  If its tokens came before the parser recognized it, insert its row before theirs."""
        self._channel = "call" if isinstance(beat.frame, SERVED) else channel_of(beat.frame)
        self._items += self._has_begun and isinstance(beat.frame, OPENINGS)
        place = next((at for at, row in enumerate(self.rows) if row.item == self._items and row.tokens), None)
        if place is None or isinstance(beat.frame, SERVED):
            self._border("open", beat)
        else:
            self._row = Row("open", beat.at, self._channel, frame=beat.frame)
            self.rows.insert(place, self._row)

    def _border(self, kind: Kind, beat: _Beat) -> None:
        """Add the row for the opening or closing of an item; if the latest row has its markup, reuse that row."""
        row = self._row
        place = next(
            (at for at, each in enumerate(self.rows) if (-1 if each.item is None else each.item) > self._items), None
        )
        if kind == "close" and place is not None:  # items that began meanwhile come after it
            row = self._row = Row(kind, beat.at)
            self.rows.insert(place, row)
        elif row.kind != "markup" or not row.tokens:
            row = self._begin(Row(kind, beat.at))
        row.kind, row.channel, row.frame, row.until = kind, self._channel, beat.frame, beat.at


def _kind_of(frame: Any) -> Kind:
    match frame:
        case ResponseStarted() | GenerationStarted():
            return "begin"
        case CallStarted() | CallFinished() | AnnotationAdded():
            return "tool"
        case TurnFinished() | GenerationFinished():
            return "finish"
        case _:
            return "more"
