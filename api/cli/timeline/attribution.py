"""The item of each token of a model, or none for markup, and the repairs made at the token.

The parser is run on one token at a time; the place of a token follows from the frames that it yields for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.frames import (
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    MessageOpened,
    ReasoningOpened,
    RefusalOpened,
    Repair,
    TokenChunk,
    TokenFrame,
)
from penstock.pipeline.recordings.model import RecordedModel, Spelling
from penstock.pipeline.trace import traced

Channel: TypeAlias = Literal["markup", "analysis", "commentary", "final", "call"]
"""The place of a token: in no item ("markup"), or in the text of an item of that kind."""

OPENINGS = get_args(ItemOpened)
BORDERS = (*OPENINGS, ItemClosed)

AT_THE_START: frozenset[Repair] = frozenset({"missing start"})
AT_THE_END: frozenset[Repair] = frozenset({"missing end"})
WITHIN: frozenset[Repair] = frozenset({"stray marker"})
"""The repairs by their place in an item; all others are made at the end of its header."""


@dataclass(frozen=True)
class AttributedToken:
    """One token.

    ``written`` are its bytes.  ``is_mark`` is True for a special token.  ``frame`` is the index of the frame that it
    came in, and ``item`` the index of its item among all that the parser opened.  ``repairs`` were made at this token.
    ``borders`` is the number of items that opened or closed at it.
    """

    id: int
    written: bytes
    is_mark: bool
    frame: int
    channel: Channel = "markup"
    item: int | None = None
    repairs: tuple[Repair, ...] = ()
    borders: int = 0


def channel_of(opened: ItemOpened) -> Channel:
    """Return the channel of the text of an item."""
    match opened:
        case ReasoningOpened():
            return "analysis"
        case MessageOpened(phase="commentary"):
            return "commentary"
        case MessageOpened() | RefusalOpened():
            return "final"
        case _:
            return "call"


async def attributed(
    frames: Sequence[TokenFrame], parse: Pipeline[Any, Any], model: RecordedModel
) -> tuple[AttributedToken, ...]:
    """Return each token of ``frames`` with its item.  The model must have a ``spelling``."""
    assert model.spelling is not None
    single = [(index, one) for index, frame in enumerate(frames) for one in one_by_one(frame)]
    parsed = (await traced(parse, source_of(one for _, one in single), "tokens")).junctions[-1]
    parsed_frames: list[list[Any]] = [[] for _ in single]
    for caused in parsed.caused:
        parsed_frames[caused.cause or 0].append(caused.frame)
    attribution = _Attribution(model.spelling, model.is_mark)
    for (index, one), came in zip(single, parsed_frames, strict=True):
        if isinstance(one, GenerationStarted):
            attribution.begin()
        if isinstance(one, TokenChunk):
            attribution.add(one.token_ids[0], index)
        attribution.feed(came)
    return tuple(attribution.tokens)


def one_by_one(frame: TokenFrame) -> Iterable[TokenFrame]:
    """Split a chunk into one chunk per token; return any other frame as it is."""
    if not isinstance(frame, TokenChunk):
        return (frame,)
    if not frame.logprobs:
        return (TokenChunk((token,)) for token in frame.token_ids)
    return (TokenChunk((token,), (logprob,)) for token, logprob in zip(frame.token_ids, frame.logprobs, strict=True))


@dataclass
class _Attribution:
    """Assigns places to tokens; a token of text waits until the parser shows which item it belongs to.

    ``waiting`` and ``strays`` are indexes into ``tokens``: the ordinary tokens without a place yet, and the special
    tokens since the latest item opened.  ``items`` counts the opened items.
    """

    spelling: Spelling
    is_mark: Any
    tokens: list[AttributedToken] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    strays: list[int] = field(default_factory=list)
    items: int = 0
    open: ItemOpened | None = None
    began_at: int = 0
    opened_at: int = 0

    def begin(self) -> None:
        """Begin a turn."""
        self.waiting, self.open, self.began_at = [], None, len(self.tokens)

    def add(self, token: int, frame: int) -> None:
        """Add the next token, from the frame with that index."""
        is_mark = self.is_mark(token)
        (self.strays if is_mark else self.waiting).append(len(self.tokens))
        self.tokens.append(AttributedToken(token, self.spelling(token), is_mark, frame))

    def feed(self, frames: Sequence[Any]) -> None:
        """Take the frames that the parser yielded for the latest token."""
        has_opened = False
        for frame in frames:
            if isinstance(frame, OPENINGS):
                self._open(frame)
                has_opened = True
            elif isinstance(frame, ItemDelta) and self.open:
                spelling = self._spelling_of(frame.text)
                self._fill(self.open, spelling if has_opened else spelling or self.waiting)
            elif isinstance(frame, ItemClosed):
                self._close(frame.repairs)
        if has_opened:
            self.waiting = []
        if borders := sum(isinstance(frame, BORDERS) for frame in frames):
            self._change(len(self.tokens) - 1, borders=borders)

    def _open(self, opened: ItemOpened) -> None:
        self.open, self.opened_at = opened, len(self.tokens) - 1
        self.strays = []
        self.items += 1

    def _fill(self, opened: ItemOpened, indexes: Iterable[int]) -> None:
        """Mark these tokens as text of the open item."""
        for index in indexes:
            self._change(index, channel=channel_of(opened), item=self.items - 1)
        self.waiting = []

    def _spelling_of(self, text: str) -> list[int]:
        """Return the waiting tokens that spell ``text``, which may have been stripped; empty if they do not."""
        written = b"".join(self.tokens[index].written for index in self.waiting)
        sought = (text.strip() or text).encode()
        start = written.find(sought)
        if start < 0:
            return []
        spelling, at = [], 0
        for index in self.waiting:
            end = at + len(self.tokens[index].written)
            if start < end and at < start + len(sought):
                spelling.append(index)
            at = end
        return spelling

    def _close(self, repairs: Iterable[Repair]) -> None:
        last = len(self.tokens) - 1
        for repair in repairs:
            if repair in WITHIN and (strays := [index for index in self.strays if self.opened_at < index < last]):
                self._mark(strays, repair)
            elif repair in AT_THE_START:
                self._mark([self.began_at], repair)
            else:
                self._mark([last if repair in AT_THE_END else self.opened_at], repair)
        self.open, self.strays, self.began_at = None, [], len(self.tokens)

    def _mark(self, indexes: Iterable[int], repair: Repair) -> None:
        for index in indexes:
            if index < len(self.tokens):
                self._change(index, repairs=(*self.tokens[index].repairs, repair))

    def _change(self, index: int, **changes: Any) -> None:
        if index >= 0:
            self.tokens[index] = replace(self.tokens[index], **changes)
