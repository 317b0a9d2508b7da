"""Every fixture through every stage, one junction at a time.

Each stage gets the recorded frames of its source and must give the recorded frames behind it.  ``pytest --regen``
rewrites what is derived: everything but ``request.json`` and, for recorded cases, the tokens in ``tokens.jsonl``, whose
first frame is derived from the prompt like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.core import Pipeline, Stage
from pipeline.frames import (
    Conversation,
    EmittedFrame,
    FinishReason,
    GenerationFinished,
    GenerationStarted,
    ItemTokens,
    ParsedFrame,
    Prompt,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
)
from pipeline.protocol.events import OutputItemAdded, OutputItemDone
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import Response
from pipeline.record import read_frames, replay, write_frames
from stages.emit.emit import emit
from stages.generate.generate import Generate
from stages.generate.replay import ReplayEngine
from stages.harmony import RETURN, STOP_TOKENS, HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.parse.harmony import ParseHarmony
from stages.persist.live import LiveResponses
from stages.persist.persist import Persist
from stages.persist.store import Store
from stages.render.harmony import RenderHarmony
from tests.databases import opened
from tests.streams import checked, final

FIXTURES = Path(__file__).parent.parent / "fixtures" / "harmony"
CASES = sorted(FIXTURES.glob("*/"), key=lambda case: case.name)
CREATED_AT = 1_790_000_000.0


class Case:
    """The files of one fixture; ``regen`` writes where it would compare."""

    def __init__(self, folder: Path, *, regen: bool) -> None:
        self.folder = folder
        self.regen = regen

    def path(self, junction: str) -> Path:
        return self.folder / junction

    def read(self, junction: str, frames: Any) -> list[Any]:
        return list(read_frames(self.path(junction), frames))

    def expect(self, junction: str, frames: list[Any], types: Any) -> None:
        if self.regen:
            write_frames(self.path(junction), frames)
        assert frames == self.read(junction, types)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, regen=bool(request.config.getoption("--regen")))


async def through(stage: Stage[Any, Any], frames: Iterable[Any]) -> list[Any]:
    async with Pipeline.start("stage", stage).open(replay(frames)) as stream:
        return [frame async for frame in stream]


async def test_fixture(case: Case, encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """Each stage turns its recorded source into its recorded output."""
    async with opened(str(tmp_path / "responses.sqlite3")) as store:
        await flow(case, encoding, store)


async def flow(case: Case, encoding: HarmonyEncoding, store: Store) -> None:
    suffix = case.folder.name.encode().hex()[:32].ljust(32, "0")
    normalize = Normalize(store, ("tiny-gpt-oss",), draw=lambda: suffix, clock=lambda: CREATED_AT)

    request = await read_request(case.path("request.json").read_bytes())
    case.expect("conversation.jsonl", await through(normalize, [request]), Conversation)
    render = RenderHarmony(encoding)
    case.expect("prompt.jsonl", await through(render, case.read("conversation.jsonl", Conversation)), Prompt)
    prompts = case.read("prompt.jsonl", Prompt)
    if case.regen and case.path("completion.txt").exists():
        write_frames(case.path("tokens.jsonl"), hand_written(case.path("completion.txt"), prompts[0], encoding))
    generate = Generate(ReplayEngine(case.path("tokens.jsonl")))
    case.expect("tokens.jsonl", await through(generate, prompts), TokenFrame)
    parse = ParseHarmony(encoding)
    case.expect("parsed.jsonl", await through(parse, case.read("tokens.jsonl", TokenFrame)), ParsedFrame)
    case.expect("events.jsonl", await through(emit, case.read("parsed.jsonl", ParsedFrame)), EmittedFrame)
    emitted = case.read("events.jsonl", EmittedFrame)
    events = await through(Persist(LiveResponses(store)), emitted)
    response = final(checked(events))
    if case.regen:
        case.path("response.json").write_bytes(msgspec.json.format(msgspec.json.encode(response)) + b"\n")
    assert response == msgspec.json.decode(case.path("response.json").read_bytes(), type=Response)
    stored = await store.get(response.id, "")
    assert stored is not None
    assert stored.response == response
    assert stored.tokens == {told.item_id: told.token_ids for told in emitted if isinstance(told, ItemTokens)}


def hand_written(completion: Path, prompt: Prompt, encoding: HarmonyEncoding) -> list[TokenFrame]:
    r"""Token frames from text with markers; ``<|123|>`` is the token of that id, ``<\|`` no marker at all."""
    text = completion.read_text()
    token_ids = read_completion(text, encoding)
    stopped = set(token_ids[-6:]) & {*STOP_TOKENS, 199_999} or text.endswith(prompt.sampling.stop or "\0")
    reason: FinishReason = "stop" if stopped else "length"
    logprobs = made_up(token_ids, prompt.sampling.logprobs)
    return [
        GenerationStarted(prompt.response, prompt.input, len(prompt.token_ids)),
        *(TokenChunk((token,), logprobs[at : at + 1]) for at, token in enumerate(token_ids)),
        GenerationFinished(reason, cached_tokens=0, duration=0.0),
    ]


OTHERS = ((RETURN, -1.0625), (9552, -2.0625), (40, -3.0625), (200_014, -4.0625), (13, -inf))
"""What else might have come, in a hand-written case: a marker, part of a character, a word, no token at all, a dot."""


def made_up(token_ids: list[int], top: int | None) -> tuple[TokenLogprob, ...]:
    """A logprob for each token, if they were asked for: 0, -1/8, -2/8 and so on down to -15/8, and from 0 again."""
    if top is None:
        return ()
    found = [(token, -(position % 16) / 8) for position, token in enumerate(token_ids)]
    likeliest = (sorted([own, *OTHERS], key=itemgetter(1), reverse=True) for own in found)
    return tuple(TokenLogprob(own[1], tuple(others[:top])) for own, others in zip(found, likeliest, strict=True))


def read_completion(text: str, encoding: HarmonyEncoding) -> list[int]:
    token_ids: list[int] = []
    for piece in re.split(r"(<\|\w+\|>)", text):
        if marker := re.fullmatch(r"<\|(\d+)\|>", piece):
            token_ids.append(int(marker[1]))
        elif re.fullmatch(r"<\|\w+\|>", piece):
            token_ids += encoding.encode_markup(piece)
        else:
            token_ids += encoding.encode(piece.replace("<\\|", "<|"))
    return token_ids


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
            assert (event.item.id if isinstance(event, OutputItemDone) else event.item_id) == item_ids[-1]


def test_the_readme_lists_every_case() -> None:
    """Where each fixture comes from is written down."""
    readme = (FIXTURES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` ", readme, re.MULTILINE)) == {case.name for case in CASES}


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_a_request_is_readable(folder: Path) -> None:
    """A fixture's request is plain JSON that a person can post."""
    assert json.loads((folder / "request.json").read_text())["input"]
