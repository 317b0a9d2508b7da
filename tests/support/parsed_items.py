"""The parser's frames, told as items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.frames import (
    ClientCallOpened,
    FinishReason,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    Repair,
    ServerCallOpened,
    TokenChunk,
    TokenFrame,
    TokenIds,
    TurnFinished,
)
from pipeline.protocol.items import Logprob
from stages.harmony import HarmonyEncoding
from stages.parse.harmony import HarmonyParser
from tests.support.stored_responses import response

OPENINGS = ReasoningOpened | MessageOpened | ClientCallOpened | ServerCallOpened


@dataclass
class Parsed:
    """An item as its frames told it."""

    kind: str
    name: str
    deltas: list[str] = field(default_factory=list)
    complete: bool | None = None
    repairs: tuple[Repair, ...] = ()
    namespace: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    token_ids: TokenIds = ()

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def items(frames: Iterable[ParsedFrame]) -> list[Parsed]:
    """The items that frames tell of, with the grammar of the junction checked."""
    told: list[Parsed] = []
    for frame in frames:
        is_open = bool(told) and told[-1].complete is None
        match frame:
            case _ if isinstance(frame, OPENINGS):
                assert not is_open
                name = getattr(frame, "phase", "") or getattr(frame, "name", "")
                namespace = getattr(frame, "namespace", None) or getattr(frame, "server_label", None)
                told.append(Parsed(type(frame).__name__.removesuffix("Opened"), name, namespace=namespace))
            case ItemDelta(text, logprobs):
                assert is_open
                assert text
                told[-1].deltas.append(text)
                told[-1].logprobs += logprobs
            case ItemClosed(complete, repairs, token_ids):
                assert is_open
                told[-1].complete, told[-1].repairs, told[-1].token_ids = complete, repairs, token_ids
            case TurnFinished() | GenerationStarted():
                assert not is_open
            case _:
                raise AssertionError(f"the parser never says {frame}")
    return told


def started(**fields: Any) -> GenerationStarted:
    """The first frame, with what it says of the request."""
    return GenerationStarted(response(), (), 0, **fields)


def run(encoding: HarmonyEncoding, frames: Iterable[TokenFrame]) -> list[ParsedFrame]:
    """What the stage gives."""
    parser = HarmonyParser(encoding)
    return [parsed for frame in frames for parsed in _short_or_long(parser, frame)]


def run_long(encoding: HarmonyEncoding, frames: Iterable[TokenFrame]) -> list[ParsedFrame]:
    """What the machine gives where no frame takes the short way."""
    parser = HarmonyParser(encoding)
    return [parsed for frame in frames for parsed in list(parser.feed(frame))]


def _short_or_long(parser: HarmonyParser, frame: TokenFrame) -> list[ParsedFrame]:
    delta = parser.plain(frame)
    return list(parser.feed(frame)) if delta is None else [delta]


def parse(
    encoding: HarmonyEncoding, chunks: Iterable[Sequence[int]], reason: FinishReason = "stop", **fields: Any
) -> list[Parsed]:
    tokens = (TokenChunk(tuple(chunk)) for chunk in chunks if chunk)
    return items(run(encoding, [started(**fields), *tokens, GenerationFinished(reason, 0, 0.0)]))


def parse_text(encoding: HarmonyEncoding, text: str, reason: FinishReason = "stop", **fields: Any) -> list[Parsed]:
    return parse(encoding, ([token] for token in encoding.encode_markup(text)), reason, **fields)


def summary(told: list[Parsed]) -> list[Parsed]:
    """The items, each in one piece."""
    return [replace(item, deltas=[item.text]) for item in told]
