"""The vocabulary of gpt-oss: its special tokens, its bytes, and a fast encoder over both.

The ranks are those that oss-harmony embeds, read through its public API, so nothing is downloaded.  Encoding goes
through tiktoken: the same ids, but in linear time and without the GIL, where the package's own encoder is quadratic on
long runs of one character (openai/harmony#110).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions

import tiktoken
from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from pipeline.protocol.items import (
    ApplyPatchCall,
    CodeInterpreterCall,
    LocalShellCall,
    McpApprovalRequest,
    McpCall,
    ShellCall,
    WebSearchCall,
)
from pipeline.protocol.tools import HOSTED, HostedTool, Tool
from stages.calls import AnyCall, browser_function

START = 200006
END = 200007
MESSAGE = 200008
CHANNEL = 200005
CONSTRAIN = 200003
RETURN = 200002
CALL = 200012
END_OF_TEXT = 199999

STOP_TOKENS = (RETURN, CALL)
"""What ends the assistant's turn; never END, which only ends a message."""

TEXT_TOKENS = 199_998
"""Ids below are text; from here on they are special."""

VOCABULARY_SIZE = 201_088

FUNCTIONS = "functions"
"""The namespace of tools that came in none."""

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

_LETTER_RUN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
SPLIT_PATTERN = "|".join(
    [*_LETTER_RUN, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
)
"""How o200k splits text before merging, as published with tiktoken (``o200k_base``)."""

_PIECE = 500_000
"""Characters encoded at a time: a million spaces in a row overflow the stack of tiktoken's splitter, which panics."""


class ClobberedInstall(RuntimeError):
    """Two distributions own the module ``openai_harmony``, and have overwritten each other's files."""


@dataclass(frozen=True, eq=False, repr=False)  # a picture of it would be megabytes
class HarmonyEncoding:
    """Text to ids and back."""

    _tiktoken: tiktoken.Encoding
    token_bytes: tuple[bytes, ...]
    """The bytes of each text token, by id."""
    token_texts: Mapping[int, str]
    """The text of each token that is a whole text by itself: no special token, and no part of a character."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, in which nothing is special: ``<|end|>`` in it stays seven characters."""
        if len(text) <= _PIECE:
            return self._tiktoken.encode_ordinary(text)
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return [token for piece in pieces for token in self._tiktoken.encode_ordinary(piece)]

    def encode_markup(self, text: str) -> list[int]:
        """The ids of ``text`` with its markers as special tokens: for markup of our own, never for a client's text."""
        return self._tiktoken.encode(text, allowed_special="all")

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """The text of ``token_ids``, special tokens as markers: for people to read."""
        return self._tiktoken.decode(list(token_ids))

    def mark(self, token: int) -> str | None:
        """How a special token is written; None for text tokens."""
        if token < TEXT_TOKENS:
            return None
        try:
            return self.decode((token,))
        except KeyError:
            return f"<|reserved_{token}|>"


@cache
def load_encoding() -> HarmonyEncoding:
    """Build the encoding, once per process; about a second.

    Raises `ClobberedInstall` when openai-harmony is installed beside oss-harmony.
    """
    owners = packages_distributions().get("openai_harmony", [])
    if len(set(owners)) > 1:
        names = " and ".join(sorted(set(owners)))
        raise ClobberedInstall(f"{names} both own the module openai_harmony: uninstall both, then install oss-harmony")
    os.environ.pop("TIKTOKEN_ENCODINGS_BASE", None)  # would replace the embedded vocabulary
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    token_bytes = tuple(
        harmony.decode([token], errors="surrogateescape").encode("utf-8", "surrogateescape")
        for token in range(TEXT_TOKENS)
    )
    ranks = {token: rank for rank, token in enumerate(token_bytes)}
    fast = tiktoken.Encoding(
        "o200k_harmony", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=_SPECIAL_TOKENS
    )
    return HarmonyEncoding(fast, token_bytes, _texts(token_bytes))


def recipient_of(tool: Tool | AnyCall) -> str:
    """To whom a message goes that calls ``tool``: its full name, ``functions.get_weather``, or just ``python``."""
    match tool:
        case CodeInterpreterCall() | HostedTool(namespace="python"):
            return "python"
        case WebSearchCall(action=action):
            return f"browser.{browser_function(action)}"
        case ShellCall(runs_here=True):
            return "container.exec"
        case McpCall() | McpApprovalRequest():
            return f"{tool.server_label}.{tool.name}"
        case LocalShellCall():
            return f"{FUNCTIONS}.local_shell"
        case ShellCall():
            return f"{FUNCTIONS}.shell"
        case ApplyPatchCall():
            return f"{FUNCTIONS}.apply_patch"
        case _:
            return f"{tool.namespace or FUNCTIONS}.{tool.name}"


BUILT_IN = frozenset(recipient_of(tool) for tools in HOSTED.values() for tool in tools)
"""The recipients that the model was taught, and addresses now and then though nobody declared them."""


def _texts(token_bytes: Sequence[bytes]) -> dict[int, str]:
    texts = {}
    for token, raw in enumerate(token_bytes):
        with suppress(UnicodeDecodeError):
            texts[token] = raw.decode()
    return texts
