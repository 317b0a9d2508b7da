"""Running on: the new engine writes on from the first change of an answer, and the items are compared."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from msgspec import UNSET
from msgspec.structs import asdict

from penstock.extensions.workbench.forced.scores import Run, renamed
from penstock.extensions.workbench.forced.turn import Turn
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    FinishReason,
    GenerationFinished,
    ItemDelta,
    ItemOpened,
    TokenChunk,
    TokenFrame,
    TokenIds,
    replace,
)
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.services.engines.engine import Engine
from penstock.stages.parse.parser import ParseStage

Verdict: TypeAlias = Literal["same items", "thoughts differ", "text differs", "call differs"]
"""The change for a client, the least first."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

LEAST = 256
"""Tokens that the engine may write at least, if the recorded turn is shorter: a call may take another form."""


@dataclass(frozen=True)
class ReadItem:
    """An item as the parser reads it: its kind, its name if it is a call, and its text or arguments."""

    kind: str
    name: str
    text: str

    @property
    def is_call(self) -> bool:
        """True if it is a call of a tool."""
        return self.kind not in THOUGHTS | SPOKEN

    @property
    def content(self) -> Any:
        """The text; of a call the arguments, in which spaces and the order of keys do not count."""
        if not self.is_call:
            return self.text
        try:
            return json.loads(self.text)
        except ValueError:
            return self.text


FAILURE = "Failure"
"""The kind of the last item of a turn that no parser can read to its end: the response fails there."""

THOUGHTS, SPOKEN = frozenset({"Reasoning"}), frozenset({"Message", "Refusal", FAILURE})
"""The kinds of items that are no calls."""


@dataclass(frozen=True, kw_only=True)
class RunOn:
    """A turn as the new engine would have written it, from its token ``since`` on.

    ``difference`` says in words what has changed.
    """

    verdict: Verdict
    difference: str
    turn: int
    since: int
    tokens: TokenIds
    recorded: tuple[ReadItem, ...]
    new: tuple[ReadItem, ...]


async def run_on(engine: Engine, parse: ParseStage, turn: Turn, at: int, request_id: str, run: Run) -> RunOn:
    """Let the engine continue a turn from the token ``at`` on, where its choice has changed.

    A turn that a grammar held is written anew: a grammar begins with the output.  Raise what ``run``,
    which is `Engine.open` or `checked`, raises.
    """
    since = 0 if turn.started.held_to_grammar else at
    before = turn.tokens[:since]
    written: list[int] = []
    reason: FinishReason = "cancelled"
    async with run(_prompt(engine, turn, before, request_id)) as frames:
        async for frame in frames:
            if isinstance(frame, TokenChunk):
                written += frame.token_ids
            elif isinstance(frame, GenerationFinished):
                reason = frame.reason
    tokens = (*before, *written)
    ended = turn.finished.reason if turn.finished else "cancelled"
    recorded, new = await read_items(parse, turn, turn.tokens, ended), await read_items(parse, turn, tokens, reason)
    verdict, difference = compared_items(recorded, new)
    return RunOn(
        verdict=verdict, difference=difference, turn=turn.number, since=since, tokens=tokens, recorded=recorded, new=new
    )


def _prompt(engine: Engine, turn: Turn, before: TokenIds, request_id: str) -> Any:
    recorded, rest = turn.prompt.facts.sampling, len(turn.tokens) - len(before)
    is_whole = turn.finished is not None and turn.finished.reason == "stop"
    most = max(LEAST, 2 * rest) if is_whole else rest
    room = engine.context_length - len(turn.prompt.token_ids) - len(before)
    sampling = replace(
        recorded,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        logprobs=None,
        prompt_logprobs=UNSET,
        max_tokens=max(1, min(most, room)),
    )
    prompt = renamed(engine, turn.prompt, request_id, sampling)
    return replace(prompt, token_ids=(*turn.prompt.token_ids, *before))


async def read_items(parse: ParseStage, turn: Turn, tokens: TokenIds, reason: FinishReason) -> tuple[ReadItem, ...]:
    """Return the items that the parser reads in a turn."""

    async def source() -> AsyncGenerator[TokenFrame, None]:
        yield turn.started
        if tokens:
            yield TokenChunk(tokens)
        yield GenerationFinished(reason, cached_tokens=0, duration=0.0)

    items: list[ReadItem] = []
    try:
        async for frame in parse(source()):
            if isinstance(frame, get_args(ItemOpened)):
                items.append(_opened(frame))
            elif isinstance(frame, ItemDelta):
                last = items.pop()
                items.append(ReadItem(last.kind, last.name, last.text + frame.text))
    except EngineFailed as error:
        items.append(ReadItem(FAILURE, "", error.message))
    return tuple(items)


def _opened(frame: Any) -> ReadItem:
    fields = asdict(frame)
    names = (fields.get(name) for name in ("server_label", "namespace", "name"))
    return ReadItem(type(frame).__name__.removesuffix("Opened"), ".".join(filter(None, names)), "")


def compared_items(recorded: Sequence[ReadItem], new: Sequence[ReadItem]) -> tuple[Verdict, str]:
    """Return what differs for a client, and how; calls weigh most, and thoughts least."""
    was, now = _calls(recorded), _calls(new)
    for one, other in zip(was, now, strict=False):
        if _name(one) != _name(other):
            return "call differs", f"{_name(one)} -> {_name(other)}"
        if one.content != other.content:
            return "call differs", f"{_name(one)} {_short(one.text)} -> {_short(other.text)}"
    if len(was) > len(now):
        return "call differs", f"no {_name(was[len(now)])}"
    if len(now) > len(was):
        return "call differs", f"also {_name(now[len(was)])}"
    if difference := _difference(recorded, new, SPOKEN):
        return "text differs", difference
    if difference := _difference(recorded, new, THOUGHTS):
        return "thoughts differ", difference
    return "same items", ""


def _calls(items: Sequence[ReadItem]) -> list[ReadItem]:
    return [item for item in items if item.is_call]


def _name(item: ReadItem) -> str:
    return item.name or item.kind


def _short(text: str) -> str:
    return shortened(text, 60)


def _difference(recorded: Sequence[ReadItem], new: Sequence[ReadItem], kinds: Container[str]) -> str:
    """Return both texts from a little before the first character that differs; empty if none does."""
    one, other = ("\n\n".join(item.text for item in items if item.kind in kinds) for items in (recorded, new))
    if one == other:
        return ""
    at = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    start = max(0, (min(len(one), len(other)) if at is None else at) - 20)
    return f"{_short(one[start:])!r} -> {_short(other[start:])!r}"
