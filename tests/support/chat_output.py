"""What chat models write, and what is parsed of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.frames import (
    ChatTurn,
    FinishReason,
    GenerationFinished,
    GenerationStarted,
    ParsedFrame,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
    TurnFinished,
)
from pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpTool, Toolset
from stages.chat.model import ChatModel
from stages.parse.chat.parse import ChatParser
from tests.support.chat_families import FAMILIES, chat_model
from tests.support.parsed_items import Parsed, items, started

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = FunctionTool("get_weather", parameters=CITY)
TOOLS = Toolset(
    (
        WEATHER,
        FunctionTool("get_time"),
        CustomTool("note"),
        HostedTool("python", "python"),
        HostedTool("browser", "search"),
        HostedTool("container", "exec"),
        McpTool("docs", "ask"),
        McpTool("docs", "write", needs_approval=True),
        FunctionTool("spawn", namespace="team"),
        FunctionTool("shell", form="shell"),
    )
)


def prompt(family: str) -> tuple[int, ...]:
    """What the family's template ends with."""
    return tuple(chat_model(family).vocabulary.encode(f"Hi\n{FAMILIES[family].prompt}"))


def tokens(family: str, text: str) -> list[int]:
    """What the model writes, without the end of its turn."""
    return chat_model(family).vocabulary.encode(text)


def ended(family: str, text: str) -> list[int]:
    """The same with the end of its turn."""
    return [*tokens(family, text), chat_model(family).stop_token_ids[0]]


def begun(family: str, turn: ChatTurn | None = None, **fields: Any) -> GenerationStarted:
    """The first frame."""
    turn = turn or ChatTurn(FAMILIES[family].variables)
    return started(**{"tools": TOOLS, "prompt": prompt(family), "chat": turn, **fields})


def run(model: ChatModel, frames: Iterable[TokenFrame]) -> list[ParsedFrame]:
    parser = ChatParser(model)
    return [parsed for frame in frames for parsed in list(parser.feed(frame))]


def chunks(token_ids: Sequence[int], size: int = 1, *, likely: bool = False) -> list[TokenChunk]:
    """Tokens as chunks, with logprobs that tell them apart where they are asked for."""
    found = [TokenLogprob(-position / 8) for position in range(len(token_ids))] if likely else []
    return [
        TokenChunk(tuple(token_ids[at : at + size]), tuple(found[at : at + size]))
        for at in range(0, len(token_ids), size)
    ]


def frames(
    family: str,
    token_ids: Sequence[int],
    reason: FinishReason = "stop",
    *,
    size: int = 1,
    likely: bool = False,
    **fields: Any,
) -> list[ParsedFrame]:
    written = chunks(token_ids, size, likely=likely)
    return run(chat_model(family), [begun(family, **fields), *written, GenerationFinished(reason, 0, 0.0)])


def parse(family: str, text: str, **fields: Any) -> list[Parsed]:
    """The items of a whole turn."""
    return items(frames(family, ended(family, text), **fields))


def cut(family: str, text: str, **fields: Any) -> list[Parsed]:
    """The items of a turn that came to the limit."""
    return items(frames(family, tokens(family, text), "length", **fields))


def told(parsed: Iterable[Parsed]) -> list[tuple[str, str, str]]:
    return [(item.kind, item.name, item.text) for item in parsed]


def finished(parsed: Sequence[ParsedFrame]) -> TurnFinished:
    last = parsed[-1]
    assert isinstance(last, TurnFinished)
    return last
