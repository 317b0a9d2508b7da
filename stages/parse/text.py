"""The text of an open item: decode split characters, cut at stop strings, align log probabilities.

A token with a whole text of its own needs none of this while `ItemText.is_plain` is True: the parsers then emit the
token's text directly.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from penstock.pipeline.frames import ItemDelta, TokenLogprob
from penstock.pipeline.protocol.items import Logprob, TopLogprob

_NEVER = -9999.0
"""The log probability of an impossible token, as in OpenAI's API: JSON has no infinity."""


class TokenVocabulary(Hashable, Protocol):
    """The part of a vocabulary that turns tokens into text."""

    @property
    def token_bytes(self) -> Mapping[int, bytes] | Sequence[bytes]:
        """The bytes of each text token, by id."""
        ...

    @property
    def token_texts(self) -> Mapping[int, str]:
        """The text of each token that is a whole text by itself: no special token, and no part of a character."""
        ...

    def mark(self, token: int) -> str | None:
        """Return the spelling of a token that is not text, such as a special token; None for a text token."""
        ...

    def is_special(self, token: int) -> bool:
        """Return True for a mark that is not part of a plain text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, marks included; may raise `LookupError` for an id without a token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...


class ItemText:
    """The text of one item, written in pieces and read as deltas; ``keeps`` is True if `written` will be read."""

    __slots__ = ("_keeps", "_kept", "_passed", "_pieces", "_stop", "length", "logprobs")

    def __init__(
        self, stop: StopStrings | None = None, logprobs: AlignedLogprobs | None = None, *, keeps: bool = False
    ) -> None:
        self._stop = stop
        self.logprobs = logprobs
        """The log probabilities to report; None if the deltas report none."""
        self._keeps = keeps
        self._pieces: list[str] = []
        self._kept: list[str] = []
        self.length = 0
        """Characters written so far."""
        self._passed = 0

    @property
    def is_plain(self) -> bool:
        """True if the next token's text can be emitted as it is, without any bookkeeping."""
        return not (self._stop or self.logprobs or self._keeps)

    @property
    def is_cut(self) -> bool:
        """True if a stop string was found."""
        return bool(self.cut_by)

    @property
    def cut_by(self) -> str:
        """The stop string that was found; empty if there is none."""
        return self._stop.found if self._stop else ""

    @property
    def written(self) -> str:
        """The whole text that the model wrote, stop string included; empty without ``keeps``."""
        return "".join(self._kept)

    def write(self, text: str) -> None:
        """Append ``text``, up to the first stop string."""
        self.length += len(text)
        if self._keeps:
            self._kept.append(text)
        self._pieces.append(self._stop.feed(text) if self._stop else text)

    def would_be_cut_by(self, text: str) -> bool:
        """Return True if a stop string ends within ``text``, if this is written next."""
        return self._stop is not None and self._stop.ends_within(text)

    def delta(self) -> Iterator[ItemDelta]:
        """Yield a delta of the text that may pass since the last call, if there is any."""
        yield from self._delta(self._passing())

    def close(self) -> Iterator[ItemDelta]:
        """Yield a delta of the remaining text, if there is any; text that was held back is included."""
        if self.logprobs:
            self.logprobs.settle(self.length)
        yield from self._delta(self._passing() + (self._stop.flush() if self._stop else ""))

    def _passing(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _delta(self, text: str) -> Iterator[ItemDelta]:
        self._passed += len(text)
        if text:
            yield ItemDelta(text, self._passed_logprobs())

    def _passed_logprobs(self) -> tuple[Logprob, ...]:
        """Return the log probabilities of the tokens whose text has passed since the last call."""
        return self.logprobs.upto(self._passed) if self.logprobs else ()


class TokenText(ItemText):
    """The text of an item, written as tokens; ``reports`` adds their log probabilities to the deltas."""

    __slots__ = ("_decoder",)

    def __init__(
        self, tokens: TokenVocabulary, stop: StopStrings | None = None, *, reports: bool = False, keeps: bool = False
    ) -> None:
        super().__init__(stop, AlignedLogprobs(tokens) if reports else None, keeps=keeps)
        self._decoder = TokenDecoder(tokens)

    @property
    def is_plain(self) -> bool:
        """True if the next token's text can be emitted as it is; False while a character is unfinished."""
        return not (self._decoder.holds_back or self._stop or self.logprobs or self._keeps)

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append the text of ``token``, with its log probability if the engine reported one."""
        text = self._decoder.decode(token)
        self.write(text)
        if self.logprobs and logprob:
            self.logprobs.add(token, logprob)
            if text or not self._decoder.holds_back:  # a token that begins a character may also end text before it
                self.logprobs.settle(self.length)

    def close(self, *, cut: bool = False) -> Iterator[ItemDelta]:
        """Yield a delta of the remaining text.  An unfinished character becomes U+FFFD; if ``cut``, it is left out."""
        if not cut:
            self.write(self._decoder.flush())
        yield from super().close()


class StopStrings:
    """Cuts one text before its first stop string.  The result does not depend on how the text is split into pieces.

    Text that may be the beginning of a stop string is held back, so that the client never sees part of one.  Text
    that is fed while ``is_due`` returns False is not searched.
    """

    def __init__(self, stops: tuple[str, ...], is_due: Callable[[], bool] = lambda: True) -> None:
        self._stops = stops
        self._is_due = is_due
        self._first_character = re.compile(f"[{re.escape(''.join(stop[0] for stop in stops))}]")
        self._held_back = ""
        self.found = ""
        """The stop string that was found.  It is dropped, with all text after it."""

    def feed(self, text: str) -> str:
        """Return the text that may pass: all text before a stop string, or before a possible beginning of one.

        If several stop strings occur, the first to end counts; of several with the same end, the longest.
        """
        if self.found:
            return ""
        if not self._is_due():
            return text
        # The fast path: no stop string can begin here.
        if not self._held_back and not self._first_character.search(text):
            return text
        text = self._held_back + text
        if occurrence := min(self._ends(text), default=None):
            end, start = occurrence
            self.found, self._held_back = text[start:end], ""
            return text[:start]
        passes = len(text) - self._beginning(text)
        self._held_back = text[passes:]
        return text[:passes]

    def flush(self) -> str:
        """Return the text that is still held back: it did not become a stop string."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def ends_within(self, text: str) -> bool:
        """Return True if a stop string ends within ``text``, if this is fed next."""
        return self._is_due() and bool(self._ends(self._held_back + text))

    def _ends(self, text: str) -> list[tuple[int, int]]:
        starts = ((stop, text.find(stop)) for stop in self._stops)
        return [(start + len(stop), start) for stop, start in starts if start >= 0]

    def _beginning(self, text: str) -> int:
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class TokenDecoder:
    """Decodes a stream of tokens to text.  A character may be spread over several tokens."""

    __slots__ = ("_bytes", "_decoder", "_texts", "holds_back")

    def __init__(self, tokens: TokenVocabulary) -> None:
        self._bytes = tokens.token_bytes
        self._texts = tokens.token_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.holds_back = False
        """True while a character is unfinished."""

    def decode(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is unfinished."""
        if not self.holds_back and (whole := self._texts.get(token)):
            return whole
        text = self._decoder.decode(self._bytes[token])
        self.holds_back = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD if a character is unfinished, else an empty text."""
        self.holds_back = False
        return self._decoder.decode(b"", final=True)


class AlignedLogprobs:
    """Log probabilities of tokens, each with the position in the text at which its token ends."""

    def __init__(self, tokens: TokenVocabulary) -> None:
        self._tokens = tokens
        self._waiting: list[Logprob] = []
        self._ends: list[int] = []
        """End positions of the first tokens in `_waiting`.  The other tokens belong to an unfinished character."""

    def add(self, token: int, logprob: TokenLogprob, *, spells: bool = True) -> None:
        """Append the log probability of ``token``; its end is given by the next `settle`.

        A token that ``spells`` nothing here has no bytes.
        """
        self._waiting.append(reported(self._tokens, token, logprob, spells=spells))

    def settle(self, end: int) -> None:
        """Record that the tokens so far spell the text up to position ``end``."""
        self._ends += [end] * (len(self._waiting) - len(self._ends))

    def upto(self, end: int) -> tuple[Logprob, ...]:
        """Return the log probabilities of tokens that end at or before position ``end``; each is returned once."""
        count = bisect_right(self._ends, end)
        passed = tuple(self._waiting[:count])
        del self._waiting[:count], self._ends[:count]
        return passed


def reported(tokens: TokenVocabulary, token: int, logprob: TokenLogprob, *, spells: bool = True) -> Logprob:
    """Return the log probability of ``token`` as answers have it; if it ``spells`` nothing, it has no bytes."""
    top = [TopLogprob(*spelled(tokens, other), finite(value)) for other, value in logprob.top]
    text, own = spelled(tokens, token)
    return Logprob(text, own if spells else (), finite(logprob.logprob), tuple(top))


def finite(logprob: float) -> float:
    """Return a log probability as a number that JSON has."""
    return max(logprob, _NEVER)


@lru_cache(maxsize=1 << 16)
def spelled(tokens: TokenVocabulary, token: int) -> tuple[str, tuple[int, ...]]:
    r"""Return the spelling of a token, and its bytes.  Part of a character is spelled as in ``\xf0\x9f``."""
    mark = tokens.mark(token)
    if mark is not None:
        return mark, tuple(mark.encode())
    raw = tokens.token_bytes[token]
    text = tokens.token_texts.get(token)
    return "".join(f"\\x{byte:02x}" for byte in raw) if text is None else text, tuple(raw)
