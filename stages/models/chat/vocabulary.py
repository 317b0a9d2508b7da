"""The vocabulary of a chat model: text to token ids and back, and its marks.

A mark is the text of an added token, special or not: ``<|im_end|>``, ``<think>``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from penstock.stages.models.chat.triggers import Triggers
from penstock.stages.models.text_pieces import pieces


class MarkParts:
    """Detects texts that could form a mark together with text beside them.

    Parts of one character are ignored: they are too common.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._all = "\0".join(marks)
        self._longest = max(map(len, marks), default=0)
        self._begins = frozenset(mark[:end] for mark in marks for end in range(2, len(mark)))
        self._ends = frozenset(mark[start:] for mark in marks for start in range(1, len(mark) - 1))
        self._first_two = frozenset(end[:2] for end in self._ends)
        self._last_two = frozenset(begin[-2:] for begin in self._begins)

    def at_start(self, text: str) -> bool:
        """True if ``text`` begins with the end of a mark, or lies within a mark and is more than a word."""
        if text[:2] in self._first_two and any(text[:end] in self._ends for end in range(2, self._longest)):
            return True
        is_part = 1 < len(text) < self._longest and text in self._all
        return is_part and not text.replace("_", "").isalnum()

    def at_end(self, text: str) -> bool:
        """True if ``text`` ends with the beginning of a mark."""
        return text[-2:] in self._last_two and any(text[-size:] in self._begins for size in range(2, self._longest))


class Vocabulary:
    """The vocabulary of a tokenizer: a Hugging Face tokenizer, or a Mistral tokenizer as wrapped by vLLM."""

    def __init__(self, tokenizer: Any) -> None:
        read = _read_mistral if not hasattr(tokenizer, "backend_tokenizer") else _read_hugging_face
        marks, token_bytes = read(tokenizer)
        self.tokenizer = tokenizer
        self.marks: Mapping[str, int] = {mark: marks[mark] for mark in sorted(marks, key=len, reverse=True)}
        """The ids of the marks, longest mark first."""
        self.token_bytes: Mapping[int, bytes] = _TokenBytes(token_bytes)
        """The bytes of each token, by id; empty bytes for ids without a token."""
        self._mark_texts = {token: mark for mark, token in self.marks.items()}
        self.mark_ids = self._mark_texts.keys()
        self.token_texts: Mapping[int, str] = dict(_texts(self.token_bytes, self._mark_texts))
        """The text of each token that is valid text by itself: not a mark, and not a part of a character."""
        self._plain_texts: dict[Triggers, Mapping[int, str]] = {}

    @cached_property
    def marks_pattern(self) -> re.Pattern[str]:
        """Pattern that finds marks in text.

        Added tokens that are plain words, blanks or single characters are left out: they mark nothing.
        """
        return re.compile("|".join(map(re.escape, self._telling)) or r"(?!)")

    @cached_property
    def mark_parts(self) -> MarkParts:
        """Detector of parts of marks at the ends of a text."""
        return MarkParts(self._telling)

    @property
    def _telling(self) -> list[str]:
        return [mark for mark in self.marks if len(mark) > 1 and not mark.isspace() and not mark.isalnum()]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; marks in it become their own tokens.

        Lone surrogates, which JSON can spell but UTF-8 cannot, become ``?``.
        """
        return self._encoded(text, adds_special=False)

    def encode_prompt(self, text: str, *, adds_special: bool) -> Iterator[list[int]]:
        """Yield the token ids of a whole prompt, piece by piece; marks in it become their own tokens."""
        first, *others = pieces(text, self.marks_pattern)
        yield self._encoded(first, adds_special=adds_special)
        for piece in others:
            yield self.encode_further(piece)

    def _encoded(self, text: str, *, adds_special: bool) -> list[int]:
        known = text.encode(errors="replace").decode()
        ids: list[int] = self.tokenizer.encode(known, add_special_tokens=adds_special)
        return ids

    def encode_further(self, text: str) -> list[int]:
        """Return the token ids of ``text`` if other text comes before it.

        Some vocabularies put a blank before every text; here, that blank is left out.
        """
        if self._anchor is None:
            return self.encode(text)
        mark, token = self._anchor
        first, *ids = self.encode(mark + text)
        return ids if first == token else self.encode(text)

    @cached_property
    def _anchor(self) -> tuple[str, int] | None:
        """The mark, and its id, to encode before a text that is not the first; None if it makes no difference."""
        mark = self.tokenizer.eos_token
        if mark not in self.marks:
            return None
        return (mark, self.marks[mark]) if self.encode(f"{mark}a")[1:] != self.encode("a") else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, marks included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def mark(self, token: int) -> str | None:
        """Return the text of a mark, or a made-up one for an id without a token; None for text tokens."""
        if token in self._mark_texts:
            return self._mark_texts[token]
        return None if token in self.token_bytes else f"<|reserved_{token}|>"

    def is_special(self, token: int) -> bool:
        """Return True for a mark that is not part of a plain text, and for an id without a token."""
        return token in self._special_ids or token not in self.token_bytes

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # a Mistral tokenizer
            return frozenset(self.tokenizer.all_special_ids)
        added = backend.get_added_tokens_decoder().items()
        return frozenset(token for token, each in added if each.special)

    def plain_texts(self, triggers: Triggers) -> Mapping[int, str]:
        """Return the texts of the tokens that contain none of ``triggers`` and do not end in white space."""
        if triggers not in self._plain_texts:
            self._plain_texts[triggers] = {
                token: text
                for token, text in self.token_texts.items()
                if text and not text[-1].isspace() and triggers.isdisjoint(text)
            }
        return self._plain_texts[triggers]


class _TokenBytes(dict[int, bytes]):
    def __missing__(self, token: int) -> bytes:  # engines pad vocabularies, and may generate ids of the padding
        return b""


def _texts(token_bytes: Mapping[int, bytes], others: Container[int]) -> Iterator[tuple[int, str]]:
    for token, raw in token_bytes.items():
        if token not in others:
            with suppress(UnicodeDecodeError):  # a token may end within a character
                yield token, raw.decode()


def _read_hugging_face(tokenizer: Any) -> tuple[dict[str, int], dict[int, bytes]]:
    """Return the marks and the bytes of all tokens.

    A vocabulary spells tokens either in letters that stand for bytes, or as text with ``\u2581`` for spaces.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    spells_bytes = b"ByteLevel" in tokenizer.backend_tokenizer.decoder.__getstate__()
    to_bytes = _spelled_bytes if spells_bytes else _spelled_text
    pieces = tokenizer.get_vocab().items()
    return added, {token: piece.encode() if piece in added else to_bytes(piece) for piece, token in pieces}


def _read_mistral(tokenizer: Any) -> tuple[dict[str, int], dict[int, bytes]]:
    own = tokenizer.tokenizer
    special = {own.id_to_piece(token): token for token in tokenizer.all_special_ids}
    marks = {token: mark.encode() for mark, token in special.items()}
    others = (token for token in range(tokenizer.vocab_size) if token not in marks)
    if tokenizer.is_tekken:
        return special, {token: own.id_to_byte_piece(token) for token in others} | marks
    return special, {token: _spelled_text(own.id_to_piece(token)) for token in others} | marks


def _spelled_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, piece))
    except KeyError:  # an added token is spelled as text, in letters that may stand for no byte
        return piece.encode()


def _spelled_text(piece: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("\u2581", " ").encode()


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _letters_of_bytes() -> dict[str, int]:
    """Map the letters of byte-level vocabularies to bytes (GPT-2's scheme).

    Printable bytes are spelled as themselves, the others as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _letters_of_bytes()
