"""The text of an open item: decode split characters, cut stop texts, align log probabilities.

A token with a whole text of its own needs none of this while `ItemText.is_plain` is True: the parsers then emit the
token's text directly.
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
"""The log probability of an impossible token, as in OpenAI's API: JSON has no infinity."""


class Tokens(Hashable, Protocol):
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


class ItemText:
    """The text of one item, written in pieces and read as deltas.

    ``logprobs`` collects the log probabilities of its tokens if the deltas report them.  ``keeps`` must be True if
    `written` will be read.
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
        """True if the next token's text can be emitted as it is, without any bookkeeping."""
        return not (self._stop or self._logprobs or self._keeps)

    @property
    def is_cut(self) -> bool:
        """True if a stop text was found."""
        return self._stop is not None and self._stop.met

    @property
    def written(self) -> str:
        """The whole text that the model wrote, stop text included; empty without ``keeps``."""
        return "".join(self._kept)

    def write(self, text: str) -> None:
        """Append ``text``."""
        self._pieces.append(text)
        self._decoded += len(text)

    def delta(self) -> Iterator[ItemDelta]:
        """Yield a delta of the text that may pass since the last call, if there is any."""
        if text := self._passing():
            yield self._delta(text)

    def close(self) -> Iterator[ItemDelta]:
        """Yield a delta of the remaining text, if there is any; text that was held back is included."""
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
    """The text of an item, written as tokens.

    ``reports`` adds the tokens' log probabilities to the deltas.
    """

    def __init__(
        self, tokens: Tokens, stops: tuple[str, ...] = (), *, reports: bool = False, keeps: bool = False
    ) -> None:
        super().__init__(stops, AlignedLogprobs(tokens) if reports else None, keeps=keeps)
        self._decoder = TokenDecoder(tokens)

    @property
    def is_plain(self) -> bool:
        """True if the next token's text can be emitted as it is; False while a character is unfinished."""
        return not (self._decoder.holds_back or self._stop or self._logprobs or self._keeps)

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append the text of ``token``, with its log probability if the engine reported one."""
        self.write(self._decoder.decode(token))
        if self._logprobs and logprob:
            self._logprobs.add(token, logprob)
            if not self._decoder.holds_back:
                self._logprobs.settle(self._decoded)

    def close(self) -> Iterator[ItemDelta]:
        """Yield a delta of the remaining text, including what an unfinished character decodes to."""
        self.write(self._decoder.flush())
        yield from super().close()


class TokenDecoder:
    """Decodes a stream of tokens to text.  A character may be spread over several tokens."""

    def __init__(self, tokens: Tokens) -> None:
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

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._waiting: list[Logprob] = []
        self._ends: list[int] = []
        """End positions of the first tokens in `_waiting`.  The other tokens belong to an unfinished character."""

    def add(self, token: int, logprob: TokenLogprob) -> None:
        """Append the log probability of ``token``; its end is given by the next `settle`."""
        top = [TopLogprob(*_spelling(self._tokens, other), _finite(value)) for other, value in logprob.top]
        self._waiting.append(Logprob(*_spelling(self._tokens, token), _finite(logprob.logprob), tuple(top)))

    def settle(self, end: int) -> None:
        """Record that the tokens so far spell the text up to position ``end``."""
        self._ends += [end] * (len(self._waiting) - len(self._ends))

    def upto(self, end: int) -> tuple[Logprob, ...]:
        """Return the log probabilities of tokens that end at or before position ``end``; each is returned once."""
        count = bisect_right(self._ends, end)
        passed = tuple(self._waiting[:count])
        del self._waiting[:count], self._ends[:count]
        return passed


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)


@lru_cache(maxsize=1 << 16)
def _spelling(tokens: Tokens, token: int) -> tuple[str, tuple[int, ...]]:
    r"""Return the spelling of a token, and its bytes.  Part of a character is spelled as in ``\xf0\x9f``."""
    mark = tokens.mark(token)
    if mark is not None:
        return mark, tuple(mark.encode())
    raw = tokens.token_bytes[token]
    text = tokens.token_texts.get(token)
    return "".join(f"\\x{byte:02x}" for byte in raw) if text is None else text, tuple(raw)
