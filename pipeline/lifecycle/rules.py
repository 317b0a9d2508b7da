"""How a rule of the stream is stated, and what comes of breaking it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.pipeline.protocol.items import Logprob


class InvariantBroken(AssertionError):
    """A stream broke a rule that clients rely on."""


def rule(holds: bool, text: str) -> None:
    """Raise `InvariantBroken` with the ``text`` of a rule that does not hold."""
    if not holds:
        raise InvariantBroken(text)


@dataclass
class Text:
    """A text while it grows."""

    deltas: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    has_all_logprobs: bool = True
    done: str | None = None

    def grow(self, delta: str, logprobs: Iterable[Logprob] = ()) -> None:
        """Take one more piece."""
        rule(delta != "", "deltas are never empty")
        rule(self.done is None, "no delta follows the done event of its text")
        self.deltas.append(delta)
        before = len(self.logprobs)
        self.logprobs += logprobs
        self.has_all_logprobs = self.has_all_logprobs and len(self.logprobs) > before

    def close(self, text: str) -> None:
        """Take all of it at once."""
        rule(self.done is None, "a text is done once")
        rule(text == "".join(self.deltas), "the deltas of a text sum to the text that its done event carries")
        spelled = b"".join(bytes(token.bytes) for token in self.logprobs).decode(errors="replace")
        # Not to the letter: a stop text may begin inside a token, of which the text then has only the beginning.
        agree = spelled in text or text in spelled
        rule(agree or not self.has_all_logprobs, "the bytes of a text's tokens spell the text")
        self.done = text
