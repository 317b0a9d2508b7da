"""The item of each token of a model, or none for markup, and the repairs made at the token.

The parser is run on one token at a time; the place of a token follows from the frames that it yields for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, get_args

from penstock.api.cli.recorded_model import RecordedModel, Spelling
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
from penstock.pipeline.trace import traced

Channel: TypeAlias = Literal["markup", "analysis", "commentary", "final", "call"]
"""The place of a token: in no item ("markup"), or in the text of an item of that kind."""

OPENINGS = get_args(ItemOpened)
BORDERS = (*OPENINGS, ItemClosed)

AT_THE_START: frozenset[Repair] = frozenset({"missing start"})
AT_THE_END: frozenset[Repair] = frozenset({"missing end"})
WITHIN: frozenset[Repair] = frozenset({"stray marker"})
"""The repairs by their place in an item; all others are made at the end of its header."""


CLOSING = re.compile(rb"end|return|call|eot|eom|/", re.IGNORECASE)
"""Matches the special tokens that end an item; another one that closes an item begins the next."""


@dataclass
class AttributedToken:
    """One token.

    ``written`` are its bytes.  ``is_mark`` is True for a special token.  ``frame`` is the index of the frame that it
    came in, and ``item`` the index of its item among all that the parser opened; None in a turn without items.
    ``repairs`` were made at this token.  ``borders`` is the number of items that opened or closed at it.
    """

    id: int
    written: bytes
    is_mark: bool
    frame: int
    channel: Channel = "markup"
    item: int | None = None
    repairs: tuple[Repair, ...] = ()
    borders: int = 0

    @property
    def is_text(self) -> bool:
        """True if the token is part of the text of its item."""
        return self.channel != "markup"


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
    for crossing in parsed.crossings:
        parsed_frames[crossing.cause or 0].append(crossing.frame)
    attribution = _Attribution(model.spelling, model.is_mark)
    for (index, one), came in zip(single, parsed_frames, strict=True):
        if isinstance(one, GenerationStarted):
            attribution.begin_turn()
        if isinstance(one, TokenChunk):
            attribution.add(one.token_ids[0], index)
        attribution.feed(came)
    attribution.begin_turn()
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
    """Assigns tokens to items; a token of text waits until the parser shows which item it belongs to.

    ``waiting`` are the ordinary tokens that are not yet known to be text, ``strays`` the special tokens since the
    latest item opened, and ``between`` the tokens since the latest item closed.  ``items`` counts the opened items, and
    ``earlier`` those of earlier turns.
    """

    spelling: Spelling
    is_mark: Callable[[int], bool]
    tokens: list[AttributedToken] = field(default_factory=list)
    waiting: list[AttributedToken] = field(default_factory=list)
    strays: list[AttributedToken] = field(default_factory=list)
    between: list[AttributedToken] = field(default_factory=list)
    items: int = 0
    earlier: int = 0
    open: ItemOpened | None = None
    opened_at: int = 0
    began_at: int = 0

    def begin_turn(self) -> None:
        """Begin a turn; the last tokens of the one before belong to its last item."""
        if self.items > self.earlier:
            self._own(self.between)
        self.waiting, self.between, self.open = [], [], None
        self.began_at, self.earlier = len(self.tokens), self.items

    def add(self, token_id: int, frame: int) -> None:
        token = AttributedToken(token_id, self.spelling(token_id), self.is_mark(token_id), frame)
        self.tokens.append(token)
        (self.strays if token.is_mark else self.waiting).append(token)
        if self.open:
            self._own([token])
        else:
            self.between.append(token)

    def feed(self, frames: Sequence[Any]) -> None:
        has_opened = False
        for frame in frames:
            if isinstance(frame, OPENINGS):
                self._open(frame)
                has_opened = True
            elif isinstance(frame, ItemDelta) and self.open:
                spelling = self._spelling_of(frame.text)
                for token in spelling if has_opened else spelling or self.waiting:
                    token.channel = channel_of(self.open)
                self.waiting = []
            elif isinstance(frame, ItemClosed):
                self._close(frame.repairs)
        if has_opened:
            self.waiting = []
        if self.tokens:
            self.tokens[-1].borders += sum(isinstance(frame, BORDERS) for frame in frames)

    def _own(self, tokens: Iterable[AttributedToken]) -> None:
        for token in tokens:
            token.item = self.items - 1

    def _open(self, opened: ItemOpened) -> None:
        self.items += 1
        self._own(self.between)
        self.open, self.opened_at, self.strays, self.between = opened, len(self.tokens) - 1, [], []

    def _spelling_of(self, text: str) -> list[AttributedToken]:
        """Return the waiting tokens that spell ``text``, which may have been stripped; empty if they do not."""
        sought = (text.strip() or text).encode()
        start = b"".join(token.written for token in self.waiting).find(sought)
        ends = list(accumulate((len(token.written) for token in self.waiting), initial=0))
        return [
            token
            for token, (begin, end) in zip(self.waiting, pairwise(ends), strict=True)
            if 0 <= start < end and begin < start + len(sought)
        ]

    def _close(self, repairs: Iterable[Repair]) -> None:
        last = self.tokens[-1:]
        for repair in repairs:
            if repair in WITHIN and (strays := [token for token in self.strays if token is not last[0]]):
                marked = strays
            elif repair in AT_THE_START:
                marked = self.tokens[self.began_at : self.began_at + 1]
            else:
                marked = last if repair in AT_THE_END else self.tokens[self.opened_at : self.opened_at + 1]
            for token in marked:
                token.repairs += (repair,)
        self.open, self.strays, self.began_at = None, [], len(self.tokens)
        self.between = [token for token in last if token.is_mark and not CLOSING.search(token.written)]
