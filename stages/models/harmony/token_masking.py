"""Recordings without texts, for Harmony models also without the texts in their tokens.

Between its markers, a Harmony model writes headers and texts.  Of a header, the words of the format and the names of
the request's tools are kept.  A text is replaced by the tokens of its shape.  So a replay still shows the structure of
the output.  For other models, markup cannot be recognised here, so their tokens are left out.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from penstock.pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    ItemTokens,
    Prompt,
    RequestFacts,
    ResolvedRequest,
    TokenChunk,
)
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import Failure
from penstock.pipeline.recordings.masking import mask, mask_texts
from penstock.pipeline.recordings.redaction import Redaction
from penstock.stages.models.harmony.vocabulary import MESSAGE, TEXT_TOKENS, HarmonyEncoding, load_encoding

CHANNELS = ("analysis", "commentary", "final")

CUT = tuple(channel[:length] for channel in CHANNELS for length in range(3, len(channel)))

SPOKEN = ("system", "developer", "user", "assistant", "tool", "all", "to", "json", "code", "functions", *CHANNELS, *CUT)
"""The words that headers are made of.  The model sometimes joins words, or cuts the name of a channel short."""


MOST_HEADER_CHARACTERS = 200
"""Limit on the length of a header, in characters; longer ones are redacted like texts."""


class HarmonyWords:
    """Redacts one stream of tokens: texts become the tokens of their shape; header words and ``names`` are kept."""

    def __init__(self, encoding: HarmonyEncoding, names: Iterable[str] = ()) -> None:
        self._encoding = encoding
        words = "|".join(map(re.escape, sorted({*SPOKEN, *names}, key=len, reverse=True)))
        self._kept = re.compile(rf"\A\s*(?:{'|'.join(CHANNELS)})|(?<![\w-])(?:{words})++(?![\w-])")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: list[str] = []
        self._is_text = False

    def feed(self, token_ids: Sequence[int]) -> list[int]:
        """Return the redacted tokens so far; the tokens of a header are held back until it ends."""
        written: list[int] = []
        for token in token_ids:
            if token < TEXT_TOKENS:
                self._header.append(self._decoder.decode(self._encoding.token_bytes[token]))
                continue
            written += self.finish()
            written.append(token)
            self._is_text = token == MESSAGE
        if self._is_text or sum(map(len, self._header)) > MOST_HEADER_CHARACTERS:
            written += self._flush()
        return written

    def finish(self) -> list[int]:
        """Return the redacted tokens that were held back."""
        self._header.append(self._decoder.decode(b"", final=True))
        return self._flush()

    def _flush(self) -> list[int]:
        text = "".join(self._header)
        if not self._is_text:
            self._is_text = len(text) > MOST_HEADER_CHARACTERS
        self._header.clear()
        return self._encoding.encode(mask(text) if self._is_text else "".join(self._spoken(text)))

    def _spoken(self, header: str) -> Iterator[str]:
        end = 0
        for match in self._kept.finditer(header):
            yield mask(header[end : match.start()])
            yield match[0]
            end = match.end()
        yield mask(header[end:])


Words: TypeAlias = Callable[[Iterable[str]], HarmonyWords]
"""Makes the redactor of one stream from the names of its tools."""


def harmony_words(names: Iterable[str]) -> HarmonyWords:
    """Return the redactor of a stream, given the names of its tools and namespaces."""
    return HarmonyWords(load_encoding(), names)


@dataclass
class WithoutTexts(Redaction):
    """The redaction of one response without texts; ``words`` is None for models other than Harmony's."""

    words: Words | None
    _names: frozenset[str] = frozenset()
    _speaking: HarmonyWords | None = field(default=None)

    keeps_request = False
    changes_frames = True

    def keeps(self, stage: str) -> bool:
        """True if the frames of ``stage`` are recorded: prompts and tokens only for Harmony models."""
        return self.words is not None or stage not in ("render", "generate")

    def frames(self, stage: str, frame: Any) -> Iterable[Any]:
        """Return the frame with its texts and tokens redacted; empty if it is left out or held back."""
        if isinstance(facts := getattr(frame, "facts", None), RequestFacts):
            tools = facts.tools
            self._names |= {name for tool in tools.tools for name in (tool.namespace, tool.name) if name}
            self._names |= {server.label for server in tools.servers}
        match frame:
            case TokenChunk() | GenerationFinished():
                return self._spoken(frame)
            case ItemTokens():
                return (replace(frame, token_ids=self._tokens(frame.token_ids)),) if self.words else ()
            case GenerationStarted() if stage == "generate":
                self._speaking = self.words(self._names) if self.words else None
        return (self._without_tokens(mask_texts(frame)),)

    def response(self, response: Response) -> Response:
        """Return the response with its texts replaced by their shapes."""
        masked: Response = mask_texts(response)
        return masked

    def failure(self, failure: Failure) -> Failure:
        """Return the failure with its message redacted too: it may quote the conversation."""
        return Failure(failure.error, mask(failure.message))

    def _spoken(self, frame: TokenChunk | GenerationFinished) -> Iterator[Any]:
        assert self._speaking is not None
        token_ids = frame.token_ids if isinstance(frame, TokenChunk) else None
        tokens = self._speaking.finish() if token_ids is None else self._speaking.feed(token_ids)
        if tokens:
            yield TokenChunk(tuple(tokens))
        if isinstance(frame, GenerationFinished):
            yield replace(frame, weights=())  # they count other tokens than those that are left

    def _without_tokens(self, frame: Any) -> Any:
        match frame:
            case ResolvedRequest():
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
