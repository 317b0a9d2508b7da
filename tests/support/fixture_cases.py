"""Recorded cases: one folder each, one file per junction, and what runs a stage from one file to the next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pipeline.core import Pipeline
from pipeline.frames import (
    Conversation,
    ConversedFrame,
    EmittedFrame,
    ItemResult,
    ItemTokens,
    ParsedFrame,
    Prompt,
    TokenFrame,
)
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import Response
from pipeline.record import FORMAT, Header, read_frames, write_frames
from stages.converse.converse import Converse
from stages.emit.emit import emit
from stages.generate.generate import Generate
from stages.generate.replay import ReplayEngine
from stages.harmony import HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.persist.store import Store
from stages.render.harmony import RenderHarmony
from tests.support.completions import completions, hand_written
from tests.support.event_streams import Tap, checked, final, flowing, through
from tests.support.paths import HARMONY
from tests.support.recorded_answers import PlayedTools

CREATED_AT = 1_790_000_000.0

HARMONY_HEADER = Header(FORMAT, "tiny-gpt-oss")


class Case:
    """The files of one fixture; ``regen`` writes where it would compare."""

    def __init__(self, folder: Path, *, regen: bool, header: Header = HARMONY_HEADER) -> None:
        self.folder = folder
        self.regen = regen
        self.header = header

    def path(self, junction: str) -> Path:
        return self.folder / junction

    def read(self, junction: str, frames: Any) -> list[Any]:
        return list(read_frames(self.path(junction), frames))

    def write(self, junction: str, frames: Iterable[Any]) -> None:
        write_frames(self.path(junction), frames, self.header)

    def has(self, junction: str) -> bool:
        return self.regen or self.path(junction).is_file()

    def expect(self, junction: str, frames: list[Any], types: Any) -> None:
        """The frames are those of the file; a recording need not have one for each junction."""
        if self.regen:
            self.write(junction, frames)
        if self.has(junction):
            assert frames == self.read(junction, types)

    @property
    def born(self) -> tuple[str, float, str]:
        """What its ids are made of, its time, and its model: as recorded, or else by its name."""
        if self.regen or not self.has("conversation.jsonl"):
            return suffix_of(self.folder), CREATED_AT, self.header.model
        response = self.read("conversation.jsonl", Conversation)[0].response
        return response.id.removeprefix("resp_"), float(response.created_at), response.model


def suffix_of(folder: Path) -> str:
    """What the ids of a case are made of: its name."""
    return folder.name.encode().hex()[:32].ljust(32, "0")


async def check_events(case: Case, store: Store, source: str) -> None:
    """Emit and persist the items in the file ``source``, and compare the events and the stored response."""
    case.expect("events.jsonl", await through(emit, case.read(source, ConversedFrame)), EmittedFrame)
    emitted = case.read("events.jsonl", EmittedFrame)
    events = await through(Persist(LiveResponses(store)), emitted)
    response = final(checked(events))
    if not case.has("response.json"):
        return
    if case.regen:
        case.path("response.json").write_bytes(msgspec.json.format(msgspec.json.encode(response)) + b"\n")
    assert response == msgspec.json.decode(case.path("response.json").read_bytes(), type=Response)
    stored = await store.get(response.id, "")
    assert stored is not None
    assert stored.response == response
    assert stored.tokens == {told.item_id: told.token_ids for told in emitted if isinstance(told, ItemTokens)}
    assert stored.results == {told.item_id: told.result for told in emitted if isinstance(told, ItemResult)}


HARMONY_CASES = sorted(HARMONY.glob("*/"), key=lambda case: case.name)


async def check_conversation(case: Case, store: Store, tools: PlayedTools | None) -> None:
    """Normalize the request of a case, and compare the conversation."""
    suffix, created_at, model = case.born
    hosted = tools.toolbox.kinds if tools else frozenset[str]()
    normalize = Normalize(store, (model,), hosted, draw=lambda: suffix, clock=lambda: created_at)
    request = await read_request(case.path("request.json").read_bytes())
    case.expect("conversation.jsonl", await through(normalize, [request]), Conversation)


async def check_turns(case: Case, encoding: HarmonyEncoding, tools: PlayedTools | None) -> None:
    """Make the turns of a case, and compare the frames at each junction."""
    given = case.read("conversation.jsonl", Conversation)
    render, parse = RenderHarmony(encoding), ParseHarmony(encoding)
    if case.regen and completions(case.folder):
        prompt = (await through(render, given))[0]
        case.write("tokens.jsonl", hand_written(case.folder, prompt, encoding))
    prompts, tokens, parsed = Tap(), Tap(), Tap()
    turn = (
        Pipeline.start("render", render)
        .then("see prompts", prompts)
        .then("generate", Generate(ReplayEngine(case.path("tokens.jsonl"))))
        .then("see tokens", tokens)
        .then("parse", parse)
        .then("see items", parsed)
    )
    conversed = await flowing(with_tools(turn, tools) if tools else turn, given)
    case.expect("prompt.jsonl", prompts.passed, Prompt)
    case.expect("tokens.jsonl", tokens.passed, TokenFrame)
    case.expect("parsed.jsonl", parsed.passed, ParsedFrame)
    assert await through(parse, case.read("tokens.jsonl", TokenFrame)) == parsed.passed
    if tools:
        tools.check()
        assert len(prompts.passed) == len(completions(case.folder))
        case.expect("conversed.jsonl", conversed, ConversedFrame)


def with_tools(turn: Pipeline[Conversation, Any], tools: PlayedTools) -> Pipeline[Conversation, ConversedFrame]:
    return Pipeline.start("converse", Converse(turn, tools.toolbox, clock=lambda: 0.0))
