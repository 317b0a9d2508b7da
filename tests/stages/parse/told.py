"""The parser's frames, told as items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.frames import (
    FinishReason,
    FunctionCallOpened,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    Repair,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from stages.harmony import HarmonyEncoding
from stages.parse.harmony import HarmonyParser


@dataclass
class Parsed:
    """An item as its frames told it."""

    kind: str
    name: str
    deltas: list[str] = field(default_factory=list)
    complete: bool | None = None
    repairs: tuple[Repair, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.deltas)


def items(frames: Iterable[ParsedFrame]) -> list[Parsed]:
    """The items that frames tell of, with the grammar of the junction checked."""
    told: list[Parsed] = []
    for frame in frames:
        is_open = bool(told) and told[-1].complete is None
        match frame:
            case ReasoningOpened() | MessageOpened() | FunctionCallOpened():
                assert not is_open
                name = getattr(frame, "phase", "") or getattr(frame, "name", "")
                told.append(Parsed(type(frame).__name__.removesuffix("Opened"), name))
            case ItemDelta(text):
                assert is_open
                assert text
                told[-1].deltas.append(text)
            case ItemClosed(complete, repairs):
                assert is_open
                told[-1].complete, told[-1].repairs = complete, repairs
            case TurnFinished() | GenerationStarted():
                assert not is_open
    return told


def parse(encoding: HarmonyEncoding, chunks: Iterable[Sequence[int]], reason: FinishReason = "stop") -> list[Parsed]:
    parser = HarmonyParser(encoding)
    frames: list[TokenFrame] = [TokenChunk(tuple(chunk)) for chunk in chunks if chunk]
    return items(
        parsed for frame in [*frames, GenerationFinished(reason, 0, 0.0)] for parsed in list(parser.feed(frame))
    )


def parse_text(encoding: HarmonyEncoding, text: str, reason: FinishReason = "stop") -> list[Parsed]:
    return parse(encoding, ([token] for token in encoding.encode_markup(text)), reason)


def summary(told: list[Parsed]) -> list[tuple[object, ...]]:
    return [(item.kind, item.name, item.text, item.complete, item.repairs) for item in told]
