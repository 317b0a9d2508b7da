"""The vocabulary of a chat model: text to ids and back, with its marks told from text that looks like them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol


class Decoder(Protocol):
    """The text of one token stream."""

    def step(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        ...


class Vocabulary:
    """What is to be known of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def marks(self) -> Mapping[str, int]:
        """The tokens that stand for themselves, special or not: ``<|im_end|>``, ``<think>``; longest first."""
        added = self.tokenizer.get_added_vocab()
        return {mark: added[mark] for mark in sorted(added, key=len, reverse=True)}

    @cached_property
    def marks_pattern(self) -> re.Pattern[str]:
        """What finds a mark in text."""
        return re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, in which marks are marks."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, marks included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def decoder(self) -> Decoder:
        """A decoder for one token stream."""
        return _StreamDecoder(self.tokenizer)


class _StreamDecoder:
    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - comes with transformers, which Harmony needs not

        self._tokenizer = tokenizer._tokenizer  # noqa: SLF001 - the fast tokenizer has no other way in
        self._stream = DecodeStream(skip_special_tokens=False)

    def step(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""
