"""Every fixture through every stage, one junction at a time.

The turns of a case are made as the server makes them, with a tap at each junction; the parser, and the stages behind
the turns, get the recorded frames of their source and must give the recorded frames behind it.  ``pytest --regen``
rewrites what is derived: everything but ``request.json``, ``tools.json`` and, for recorded cases, the tokens in
``tokens.jsonl``, whose first frame is derived from the prompt like any other.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import Pipeline
from pipeline.frames import (
    Conversation,
    ConversedFrame,
    EmittedFrame,
    GenerationFinished,
    ParsedFrame,
    Prompt,
    TokenChunk,
    TokenFrame,
)
from pipeline.protocol.events import OutputItemAdded, OutputItemDone
from pipeline.protocol.reading import read_request
from pipeline.record import read_frames
from stages.converse.converse import Converse
from stages.generate.generate import Generate
from stages.generate.replay import ReplayEngine
from stages.harmony import HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.store import Store
from stages.render.harmony import RenderHarmony
from tests.completions import completions, hand_written
from tests.databases import opened
from tests.played import PlayedTools
from tests.recorded import Case, Tap, flowing, through, told

FIXTURES = Path(__file__).parent.parent / "fixtures" / "harmony"
CASES = sorted(FIXTURES.glob("*/"), key=lambda case: case.name)
SERVED = [case for case in CASES if (case / "tools.json").exists()]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, regen=bool(request.config.getoption("--regen")))


async def test_fixture(case: Case, encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """Each stage turns its recorded source into its recorded output."""
    tools = PlayedTools(case.path("tools.json")) if case.folder in SERVED else None
    async with opened(str(tmp_path / "responses.sqlite3")) as store:
        await understood(case, store, tools)
        await generated(case, encoding, tools)
        await told(case, store, "conversed.jsonl" if tools else "parsed.jsonl")


async def understood(case: Case, store: Store, tools: PlayedTools | None) -> None:
    """Up to the conversation."""
    suffix, created_at, model = case.born
    hosted = tools.toolbox.kinds if tools else frozenset[str]()
    normalize = Normalize(store, (model,), hosted, draw=lambda: suffix, clock=lambda: created_at)
    request = await read_request(case.path("request.json").read_bytes())
    case.expect("conversation.jsonl", await through(normalize, [request]), Conversation)


async def generated(case: Case, encoding: HarmonyEncoding, tools: PlayedTools | None) -> None:
    """The turns."""
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
    conversed = await flowing(served(turn, tools) if tools else turn, given)
    case.expect("prompt.jsonl", prompts.kept, Prompt)
    case.expect("tokens.jsonl", tokens.kept, TokenFrame)
    case.expect("parsed.jsonl", parsed.kept, ParsedFrame)
    assert await through(parse, case.read("tokens.jsonl", TokenFrame)) == parsed.kept
    if tools:
        tools.check()
        assert len(prompts.kept) == len(completions(case.folder))
        case.expect("conversed.jsonl", conversed, ConversedFrame)


def served(turn: Pipeline[Conversation, Any], tools: PlayedTools) -> Pipeline[Conversation, ConversedFrame]:
    return Pipeline.start("converse", Converse(turn, tools.toolbox, clock=lambda: 0.0))


# What holds of all of them


REORDERED = {"served_two_calls_at_once", "served_undeclared_answered"}
"""Cases whose next prompt goes another way before what the engine wrote ends."""


@pytest.mark.parametrize("folder", SERVED, ids=lambda folder: folder.name)
def test_a_prompt_goes_on_from_what_the_engine_wrote(folder: Path) -> None:
    """The engine has all of the last turn in its cache, and need not read it again."""
    prompts = [prompt.token_ids for prompt in read_frames(folder / "prompt.jsonl", Prompt)]
    known = [before + wrote for before, wrote in zip(prompts, written(folder), strict=True)]
    assert all(after[: len(cached)] == cached for cached, after in zip(known, prompts[1:], strict=False)) == (
        folder.name not in REORDERED
    )


def written(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of each turn."""
    turns: list[tuple[int, ...]] = [()]
    for frame in read_frames(folder / "tokens.jsonl", TokenFrame):
        if isinstance(frame, TokenChunk):
            turns[-1] += frame.token_ids
        elif isinstance(frame, GenerationFinished):
            turns.append(())
    return turns[:-1]


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_b1_every_event_carries_the_index_of_its_item(folder: Path) -> None:
    """From ``added`` to ``done`` an item stays at one index: its place in the output, the first at 0."""
    item_ids: list[str] = []
    for event in read_frames(folder / "events.jsonl", EmittedFrame):
        if isinstance(event, OutputItemAdded):
            assert event.output_index == len(item_ids)
            item_ids.append(event.item.id)
        elif hasattr(event, "output_index"):
            assert event.output_index == len(item_ids) - 1
            named = event.item.id if isinstance(event, OutputItemDone) else getattr(event, "item_id", item_ids[-1])
            assert named == item_ids[-1]


@pytest.mark.parametrize("folder", SERVED, ids=lambda folder: folder.name)
def test_a_secret_is_in_no_recording(folder: Path) -> None:
    """What authorizes a request to an MCP server stays with the request."""
    derived = [path for path in folder.iterdir() if path.name != "request.json"]
    assert not [path.name for path in derived if b"never-to-be-written" in path.read_bytes()]


def test_the_readme_lists_every_case() -> None:
    """Where each fixture comes from is written down."""
    readme = (FIXTURES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` ", readme, re.MULTILINE)) == {case.name for case in CASES}


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_a_request_is_readable(folder: Path) -> None:
    """A fixture's request is plain JSON that a person can post."""
    assert json.loads((folder / "request.json").read_text())["input"]
