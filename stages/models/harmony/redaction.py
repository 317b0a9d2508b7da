"""Recordings without texts, the tokens of a model that speaks Harmony included.

What such a model writes between its markers is either a header, which stays as far as it is made of words that the
format or the tools of the request have, or a text, whose tokens become those of its shape.  So the structure can still
be replayed.  Of other models nobody can tell here what is markup: their tokens are left out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.frames import Conversation, GenerationFinished, GenerationStarted, ItemTokens, Prompt, TokenChunk
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.protocol.tools import Toolset
from penstock.pipeline.recordings.format import Failure
from penstock.pipeline.recordings.redaction import Redaction
from penstock.pipeline.recordings.text_shapes import shape, without_texts
from penstock.stages.models.harmony.vocabulary import MESSAGE, TEXT_TOKENS, HarmonyEncoding, load_encoding

CHANNELS = ("analysis", "commentary", "final")

CUT = tuple(channel[:length] for channel in CHANNELS for length in range(3, len(channel)))

SPOKEN = ("system", "developer", "user", "assistant", "tool", "all", "to", "json", "code", "functions", *CHANNELS, *CUT)
"""The words of headers, which are now and then glued together or cut."""


LONGEST_HEADER = 200
"""Characters; what is longer is a text."""


class HarmonyWords:
    """The machine: tokens become those of their shape; ``names`` are of tools, which stay."""

    def __init__(self, encoding: HarmonyEncoding, names: Iterable[str] = ()) -> None:
        self._encoding = encoding
        words = "|".join(map(re.escape, sorted({*SPOKEN, *names}, key=len, reverse=True)))
        self._kept = re.compile(rf"\A\s*(?:{'|'.join(CHANNELS)})|(?<![\w-])(?:{words})++(?![\w-])")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: list[str] = []
        self._is_text = False

    def feed(self, token_ids: Sequence[int]) -> list[int]:
        """What may be written by now: a header waits for its end."""
        written: list[int] = []
        for token in token_ids:
            if token < TEXT_TOKENS:
                self._header.append(self._decoder.decode(self._encoding.token_bytes[token]))
                continue
            written += self.finish()
            written.append(token)
            self._is_text = token == MESSAGE
        if self._is_text or sum(map(len, self._header)) > LONGEST_HEADER:
            written += self._flush()
        return written

    def finish(self) -> list[int]:
        """What still waited."""
        self._header.append(self._decoder.decode(b"", final=True))
        return self._flush()

    def _flush(self) -> list[int]:
        said = "".join(self._header)
        if not self._is_text:
            self._is_text = len(said) > LONGEST_HEADER
        self._header.clear()
        return self._encoding.encode(shape(said) if self._is_text else "".join(self._spoken(said)))

    def _spoken(self, header: str) -> Iterator[str]:
        end = 0
        for kept in self._kept.finditer(header):
            yield shape(header[end : kept.start()])
            yield kept[0]
            end = kept.end()
        yield shape(header[end:])


Words: TypeAlias = Callable[[Iterable[str]], HarmonyWords]
"""Gives each stream its machine."""


def harmony_words(names: Iterable[str]) -> HarmonyWords:
    """The machine of a stream with tools of these names."""
    return HarmonyWords(load_encoding(), names)


@dataclass
class WithoutTexts(Redaction):
    """One response; ``words`` is None for models whose tokens nobody can read here."""

    words: Words | None
    _names: frozenset[str] = frozenset()
    _speaking: HarmonyWords | None = field(default=None)

    keeps_request = False
    changes_frames = True

    def keeps(self, stage: str) -> bool:
        """Tokens only where they can be told apart."""
        return self.words is not None or stage not in ("render", "generate")

    def frames(self, stage: str, frame: Any) -> Iterable[Any]:
        """The frame with its texts crossed out."""
        if isinstance(tools := getattr(frame, "tools", None), Toolset):
            self._names |= {name for tool in tools.tools for name in (tool.namespace, tool.name) if name}
            self._names |= {server.label for server in tools.servers}
        match frame:
            case TokenChunk() | GenerationFinished():
                return self._spoken(frame)
            case ItemTokens():
                return (replace(frame, token_ids=self._tokens(frame.token_ids)),) if self.words else ()
            case GenerationStarted() if stage == "generate":
                self._speaking = self.words(self._names) if self.words else None
        return (self._without_tokens(without_texts(frame)),)

    def response(self, response: Response) -> Response:
        """The response with its texts crossed out."""
        crossed_out: Response = without_texts(response)
        return crossed_out

    def failure(self, failure: Failure) -> Failure:
        """A message may quote anything."""
        return Failure(failure.error, shape(failure.message))

    def _spoken(self, frame: TokenChunk | GenerationFinished) -> Iterator[Any]:
        assert self._speaking is not None
        said = frame.token_ids if isinstance(frame, TokenChunk) else None
        tokens = self._speaking.finish() if said is None else self._speaking.feed(said)
        if tokens:
            yield TokenChunk(tuple(tokens))
        if said is None:
            yield frame

    def _without_tokens(self, frame: Any) -> Any:
        """The frame with the tokens that it holds beside what it says."""
        match frame:
            case Conversation():
                return replace(frame, tokens={name: self._tokens(ids) for name, ids in frame.tokens.items()})
            case Prompt():
                return replace(frame, token_ids=self._tokens(frame.token_ids))
            case GenerationStarted(prompt=ids) if ids:
                return replace(frame, prompt=self._tokens(ids))
            case _ if getattr(frame, "token_ids", ()):
                return replace(frame, token_ids=self._tokens(frame.token_ids))
            case _:
                return frame

    def _tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        if self.words is None:
            return ()
        machine = self.words(self._names)
        return (*machine.feed(token_ids), *machine.finish())
