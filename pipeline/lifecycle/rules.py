"""The rules of a stream, and the error for a broken rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.pipeline.protocol.items import Logprob


class InvariantBroken(AssertionError):
    """A stream broke a rule that clients rely on."""


def rule(holds: bool, text: str) -> None:
    """Raise `InvariantBroken` with the ``text`` of the rule unless it ``holds``."""
    if not holds:
        raise InvariantBroken(text)


@dataclass
class Text:
    """A text of a stream: its deltas so far, and the text of its done event as ``done``."""

    deltas: list[str] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    has_all_logprobs: bool = True
    done: str | None = None

    def grow(self, delta: str, logprobs: Iterable[Logprob] = ()) -> None:
        """Take the next delta."""
        rule(delta != "", "deltas are never empty")
        rule(self.done is None, "no delta follows the done event of its text")
        self.deltas.append(delta)
        before = len(self.logprobs)
        self.logprobs += logprobs
        self.has_all_logprobs = self.has_all_logprobs and len(self.logprobs) > before

    def close(self, text: str) -> None:
        """Take the text of the done event."""
        rule(self.done is None, "a text is done once")
        rule(text == "".join(self.deltas), "the deltas of a text sum to the text that its done event carries")
        token_text = b"".join(bytes(token.bytes) for token in self.logprobs).decode(errors="replace")
        # Not equal: a stop text may begin inside a token, and only the beginning of that token is in the text.
        agree = token_text in text or text in token_text
        rule(agree or not self.has_all_logprobs, "the bytes of a text's tokens spell the text")
        self.done = text
