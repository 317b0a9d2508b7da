"""Find the tokens that spell the text of a message: readers return text, without the tokens it came from."""

from __future__ import annotations

from typing import NamedTuple

from penstock.pipeline.frames import TokenLogprob
from penstock.stages.parse.text import ItemText


class _Token(NamedTuple):
    id: int
    logprob: TokenLogprob | None
    text: str
    is_mark: bool


class UnclaimedTokens:
    """The tokens whose text is not part of a message yet."""

    def __init__(self) -> None:
        self._tokens: list[_Token] = []

    def add(self, token: int, logprob: TokenLogprob | None, text: str, *, is_mark: bool) -> None:
        """Append a token, with the text that it completes."""
        self._tokens.append(_Token(token, logprob, text, is_mark))

    def claim(self, text: str, item: ItemText) -> None:
        """Add to ``item`` the log probabilities of the tokens that spell ``text``, which is about to be written to it.

        An item that reports none claims all tokens.
        """
        tokens, self._tokens = self._tokens, []
        logprobs = item.logprobs
        if logprobs is None:
            return
        plain = ["" if token.is_mark else token.text for token in tokens]
        marked = [token.text for token in tokens]
        texts = plain if text in "".join(plain) else marked  # a mark that the parser does not know is text
        joined = "".join(texts)
        begin = 0 if joined.startswith(text) else joined.rfind(text)
        end = begin + len(text)
        at = 0
        for token, own in zip(tokens, texts, strict=True) if begin >= 0 else ():
            start, at = at, at + len(own)
            if start >= end:
                self._tokens.append(token)
            elif at > begin or (start == begin and not own):
                if token.logprob and (own or not token.is_mark):
                    logprobs.add(token.id, token.logprob)
                if own:
                    logprobs.settle(item.length + min(at, end) - begin)
                if at > end:
                    self._tokens.append(token._replace(logprob=None, text=own[end - start :]))
