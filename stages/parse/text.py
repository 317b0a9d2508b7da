"""The text of an open item on its way out: split characters are joined, stop texts cut, logprobs lined up.

Nothing here is needed for a token that is a whole text, while nobody asked for more than text: see `ItemText.is_plain`.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from penstock.pipeline.frames import ItemDelta, TokenLogprob
from penstock.pipeline.protocol.items import Logprob, TopLogprob
from penstock.stages.parse.stop import StopTexts

_NEVER = -9999.0
"""What stands for the logprob of a token that cannot come, as JSON knows no infinity."""


class Tokens(Hashable, Protocol):
    """A vocabulary, as far as it takes to tell the text of tokens."""

    @property
    def token_bytes(self) -> Mapping[int, bytes] | Sequence[bytes]:
        """The bytes of each text token, by id."""
        ...

    @property
    def token_texts(self) -> Mapping[int, str]:
        """The text of each token that is a whole text by itself: no special token, and no part of a character."""
        ...

    def mark(self, token: int) -> str | None:
        """How a token is written that is no text; None for those that are."""
        ...


class ItemText:
    """The machine: one per item.

    ``logprobs`` are those of its tokens, where they go out beside their text; ``keeps`` says that `written` will be
    asked for.
    """

    def __init__(
        self, stops: tuple[str, ...] = (), logprobs: AlignedLogprobs | None = None, *, keeps: bool = False
    ) -> None:
        self._stop = StopTexts(stops) if stops else None
        self._logprobs = logprobs
        self._keeps = keeps
        self._pieces: list[str] = []
        self._kept: list[str] = []
        self._decoded = 0
        self._passed = 0

    @property
    def is_plain(self) -> bool:
        """Whether the text of the next token goes out as it is, and nothing else has to be known of it."""
        return not (self._stop or self._logprobs or self._keeps)

    @property
    def is_cut(self) -> bool:
        """Whether a stop text came."""
        return self._stop is not None and self._stop.met

    @property
    def written(self) -> str:
        """All that the model wrote, stop text included."""
        return "".join(self._kept)

    def write(self, text: str) -> None:
        """Take more text."""
        self._pieces.append(text)
        self._decoded += len(text)

    def delta(self) -> Iterator[ItemDelta]:
        """What has become clear since last time, if anything has."""
        if text := self._passing():
            yield self._delta(text)

    def close(self) -> Iterator[ItemDelta]:
        """What is left: held back, or of an unfinished character."""
        if self._logprobs:
            self._logprobs.settle(self._decoded)
        if text := self._passing() + (self._stop.flush() if self._stop else ""):
            yield self._delta(text)

    def _passing(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._keeps:
            self._kept.append(text)
        return self._stop.feed(text) if self._stop else text

    def _delta(self, text: str) -> ItemDelta:
        self._passed += len(text)
        return ItemDelta(text, self._logprobs.upto(self._passed)) if self._logprobs else ItemDelta(text)


class TokenText(ItemText):
    """The text of an item that is spelled in tokens of its own.

    ``reports`` says that their logprobs go out beside it.
    """

    def __init__(
        self, tokens: Tokens, stops: tuple[str, ...] = (), *, reports: bool = False, keeps: bool = False
    ) -> None:
        super().__init__(stops, AlignedLogprobs(tokens) if reports else None, keeps=keeps)
        self._decoder = TokenDecoder(tokens)

    @property
    def is_plain(self) -> bool:
        """Also not while a character is unfinished."""
        return not (self._decoder.holds_back or self._stop or self._logprobs or self._keeps)

    def add(self, token: int, found: TokenLogprob | None) -> None:
        """Take a token, and how likely it was."""
        self.write(self._decoder.decode(token))
        if self._logprobs and found:
            self._logprobs.add(token, found)
            if not self._decoder.holds_back:
                self._logprobs.settle(self._decoded)

    def close(self) -> Iterator[ItemDelta]:
        """What is left: held back, or of an unfinished character."""
        self.write(self._decoder.flush())
        yield from super().close()


class TokenDecoder:
    """Text of a token stream, in which a character may be spread over several tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._bytes = tokens.token_bytes
        self._texts = tokens.token_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.holds_back = False
        """Whether a character is unfinished."""

    def decode(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        if not self.holds_back and (whole := self._texts.get(token)):
            return whole
        text = self._decoder.decode(self._bytes[token])
        self.holds_back = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What an unfinished character leaves behind: U+FFFD or nothing."""
        self.holds_back = False
        return self._decoder.decode(b"", final=True)


class AlignedLogprobs:
    """The logprobs of tokens, each by the place in the text at which the token ends."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._waiting: list[Logprob] = []
        self._ends: list[int] = []
        """Where the first of those that wait end; the others belong to a character that is unfinished."""

    def add(self, token: int, found: TokenLogprob) -> None:
        """Take one more token."""
        top = [TopLogprob(*_spelling(self._tokens, other), _finite(value)) for other, value in found.top]
        self._waiting.append(Logprob(*_spelling(self._tokens, token), _finite(found.logprob), tuple(top)))

    def settle(self, end: int) -> None:
        """All tokens so far make up the text up to ``end``, and end no later."""
        self._ends += [end] * (len(self._waiting) - len(self._ends))

    def upto(self, end: int) -> tuple[Logprob, ...]:
        """Those that end within the text up to ``end``, and were not given yet."""
        count = bisect_right(self._ends, end)
        passed = tuple(self._waiting[:count])
        del self._waiting[:count], self._ends[:count]
        return passed


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)


@lru_cache(maxsize=1 << 16)
def _spelling(tokens: Tokens, token: int) -> tuple[str, tuple[int, ...]]:
    r"""How a token is written, and its bytes: ``\xf0\x9f`` for part of a character."""
    mark = tokens.mark(token)
    if mark is not None:
        return mark, tuple(mark.encode())
    raw = tokens.token_bytes[token]
    text = tokens.token_texts.get(token)
    return "".join(f"\\x{byte:02x}" for byte in raw) if text is None else text, tuple(raw)
