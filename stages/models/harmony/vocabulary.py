"""The vocabulary of gpt-oss: its special tokens, its bytes, and a fast encoder over both.

The merge ranks come from oss-harmony, which embeds them, through its public API; nothing is downloaded.  Text is
encoded by tiktoken.  It gives the same ids as the package's own encoder, but in linear time and without the GIL; the
package's encoder is quadratic on long runs of one character (openai/harmony#110).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, distribution
from typing import TypeVar

import tiktoken
from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from penstock.pipeline.errors import CannotStart
from penstock.pipeline.hosted_kinds import kinds, takes_text
from penstock.pipeline.protocol.items import CallItem, CodeInterpreterCall, Program
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Tool
from penstock.stages.models.text_pieces import PIECE_CHARACTERS, pieces

Spelled = TypeVar("Spelled")

START = 200006
END = 200007
MESSAGE = 200008
CHANNEL = 200005
CONSTRAIN = 200003
RETURN = 200002
CALL = 200012
END_OF_TEXT = 199999

STOP_TOKENS = (RETURN, CALL)
"""The tokens that end the assistant's turn.  END is not among them: it only ends a message."""

TEXT_TOKENS = 199_998
"""The first id of special tokens; lower ids are text tokens."""

VOCABULARY_SIZE = 201_088

FUNCTIONS = "functions"
"""The namespace for tools that the client put in none."""

_SPECIAL_TOKENS = {
    "<|endoftext|>": END_OF_TEXT,
    "<|return|>": RETURN,
    "<|constrain|>": CONSTRAIN,
    "<|channel|>": CHANNEL,
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|call|>": CALL,
}

_MARKERS = re.compile("|".join(map(re.escape, _SPECIAL_TOKENS)))

_MARKS = {token: mark for mark, token in _SPECIAL_TOKENS.items()}

THOUGHT = ("<|channel|>analysis<|message|>", "<|end|>")
"""The marks around a thought."""

_OWNERS = ("openai-harmony", "oss-harmony")
"""The distributions that contain the module ``openai_harmony``."""

_LETTER_RUN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
SPLIT_PATTERN = "|".join(
    [*_LETTER_RUN, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
)
"""The pattern that splits text before merging, as published with tiktoken (``o200k_base``)."""


class ClobberedInstall(CannotStart):
    """Two installed distributions own the module ``openai_harmony`` and have overwritten each other's files."""


@dataclass(frozen=True, eq=False, repr=False)  # a repr would be megabytes
class HarmonyEncoding:
    """Converts text to token ids and back."""

    token_bytes: Sequence[bytes] | Mapping[int, bytes]
    """The bytes of each text token, by id."""
    token_texts: Mapping[int, str]
    """The text of each token that is valid text by itself: not special, and not a part of a character."""

    @cached_property
    def _tiktoken(self) -> tiktoken.Encoding:
        """The encoder, built on first use: that takes half a second, and reading tokens does not need it."""
        ranks = {self.token_bytes[token]: token for token in range(TEXT_TOKENS)}
        return tiktoken.Encoding(
            "o200k_harmony", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=_SPECIAL_TOKENS
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain ``text``: ``<|end|>`` in it is encoded as seven characters."""
        if len(text) <= PIECE_CHARACTERS:
            return self._tiktoken.encode_ordinary(text)
        return [token for piece in pieces(text) for token in self._tiktoken.encode_ordinary(piece)]

    def encode_prompt(self, text: str, *, adds_special: bool) -> Iterator[list[int]]:
        """Yield the token ids of a whole prompt, piece by piece; markers in it are special tokens."""
        return (self.encode_markup(piece) for piece in pieces(text, _MARKERS))

    def encode_markup(self, text: str) -> list[int]:
        """Return the token ids of markup, with markers as special tokens.  Texts of a conversation are none."""
        return self._tiktoken.encode(text, allowed_special="all")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, with special tokens as markers, for people to read."""
        return self._tiktoken.decode(token_ids)

    def is_special(self, token: int) -> bool:
        """Return True for a token that is no text: all that are not text tokens."""
        return token >= TEXT_TOKENS

    def mark(self, token: int) -> str | None:
        """Return the marker of a special token; None for text tokens."""
        return None if token < TEXT_TOKENS else _MARKS.get(token, f"<|reserved_{token}|>")


@cache
def load_encoding() -> HarmonyEncoding:
    """Build the complete encoding, once per process, in about a second.  Raises `ClobberedInstall`."""
    parted = [END] * (2 * TEXT_TOKENS - 1)
    parted[::2] = range(TEXT_TOKENS)  # one call instead of one a token takes a tenth of a second, not half a one
    token_bytes = tuple(_read_vocabulary()(parted).split(b"<|end|>"))
    encoding = HarmonyEncoding(token_bytes, _texts(token_bytes))
    encoding.encode("")
    return encoding


@cache
def encoding_on_demand() -> HarmonyEncoding:
    """Return an encoding that is built as it is used, for short programs."""

    @cache
    def spell(token: int) -> bytes:
        return _read_vocabulary()([token])

    def text_of(token: int) -> str:
        try:
            return spell(token).decode()
        except UnicodeDecodeError:
            raise KeyError(token) from None

    return HarmonyEncoding(_OnDemand(spell), _OnDemand(text_of))


@dataclass(frozen=True, eq=False)
class _OnDemand(Mapping[int, Spelled]):
    """A mapping from text tokens to their bytes or texts, computed by ``read``, which may raise `KeyError`."""

    read: Callable[[int], Spelled]

    def __getitem__(self, token: int) -> Spelled:
        if not 0 <= token < TEXT_TOKENS:
            raise KeyError(token)
        return self.read(token)

    def __iter__(self) -> Iterator[int]:
        return iter(range(TEXT_TOKENS))

    def __len__(self) -> int:
        return TEXT_TOKENS


@cache
def _read_vocabulary() -> Callable[[Sequence[int]], bytes]:
    if all(_is_installed(name) for name in _OWNERS):
        raise ClobberedInstall(
            f"{' and '.join(_OWNERS)} both own the module openai_harmony: uninstall both, then install oss-harmony"
        )
    os.environ.pop("TIKTOKEN_ENCODINGS_BASE", None)  # this variable would replace the embedded vocabulary
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    return lambda tokens: harmony.decode(tokens, errors="surrogateescape").encode("utf-8", "surrogateescape")


def _is_installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(distribution(name))
    return False


def recipient_of(tool: Tool | CallItem) -> str:
    """Return the recipient of messages that call ``tool``: ``functions.get_weather``, or just ``python``."""
    match tool:
        case FunctionTool() | CustomTool():  # first, as a request may have thousands of them
            return f"{tool.namespace or FUNCTIONS}.{tool.name}"
        case CodeInterpreterCall() | Program():
            return tool.tool[1]
        case HostedTool() if takes_text(tool):
            return tool.spoken or tool.namespace
        case McpTool() | HostedTool():
            return f"{tool.namespace}.{tool.name}"
        case _:
            namespace, name = tool.tool
            return f"{namespace or FUNCTIONS}.{name}"


@cache
def hosted_tools() -> Mapping[str, HostedTool]:
    """Return the built-in tools by recipient; a model sometimes calls them even if the request declares none."""
    return {recipient_of(tool): tool for tool in kinds().tools}


def _texts(token_bytes: Sequence[bytes]) -> dict[int, str]:
    texts = {}
    for token, raw in enumerate(token_bytes):
        try:
            texts[token] = raw.decode()
        except UnicodeDecodeError:
            continue  # the token ends within a character
    return texts
