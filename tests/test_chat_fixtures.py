"""Every fixture of the chat path: what models of many families write, through their parsers, up to the response.

What it means is written down by hand, in `tests.chat_expected`; ``pytest --regen`` rewrites the recorded frames behind
``completion.txt``, and these must tell what is written there.  How the tokens arrive makes no difference, and wherever
they end, a turn ends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.__main__ import main
from pipeline.core import Pipeline
from pipeline.frames import (
    Conversation,
    CustomToolCallOpened,
    FinishReason,
    FunctionCallOpened,
    GenerationFinished,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    Prompt,
    ReasoningOpened,
    TokenChunk,
    TokenFrame,
    TurnFinished,
)
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import Response
from pipeline.record import FORMAT, Header, read_frames
from stages.chat.model import ChatModel
from stages.generate.generate import Generate
from stages.generate.replay import ReplayEngine
from stages.normalize.normalize import Normalize
from stages.parse.chat.parse import ParseChat
from stages.persist.store import Store
from stages.render.chat.chat import RenderChat
from tests.chat_expected import Kind, Told, expected, family_of
from tests.chat_families import FAMILIES, TINY, chat_model
from tests.databases import opened
from tests.recorded import CREATED_AT, Case, Tap, flowing, suffix_of, through, told
from tests.streams import final, read_sse

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's imports warn

FIXTURES = Path(__file__).parent.parent / "fixtures" / "chat"
CASES = sorted(FIXTURES.glob("*/"), key=lambda case: case.name)
WHOLE = [case for case in CASES if family_of(case.name) == TINY.name]
"""Those whose prompts are those of a real template."""
every_case = pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)


@every_case
async def test_fixture(folder: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Each stage turns its recorded source into its recorded output."""
    header = Header(FORMAT, family_of(folder.name), "chat", "fixtures/tiny_qwen" if folder in WHOLE else None)
    case = Case(folder, regen=bool(request.config.getoption("--regen")), header=header)
    async with opened(str(tmp_path / "responses.sqlite3")) as store:
        await generated(case, chat_model(family_of(folder.name)), store)
        await told(case, store, "parsed.jsonl")


async def generated(case: Case, model: ChatModel, store: Store) -> None:
    """The turn of a request."""
    suffix = suffix_of(case.folder)
    normalize = Normalize(store, tuple(FAMILIES), has_template=True, draw=lambda: suffix, clock=lambda: CREATED_AT)
    request = await read_request(case.path("request.json").read_bytes())
    conversations = await through(normalize, [request])
    prompts = await through(RenderChat(model, context_length=4096), conversations)
    if case.folder in WHOLE:
        case.expect("conversation.jsonl", conversations, Conversation)
        case.expect("prompt.jsonl", prompts, Prompt)
    if case.regen:
        case.write("tokens.jsonl", written(case.path("completion.txt").read_text(), prompts[0], model))
    tokens = Tap()
    turn = (
        Pipeline.start("generate", Generate(ReplayEngine(case.path("tokens.jsonl"))))
        .then("see tokens", tokens)
        .then("parse", ParseChat(model))
    )
    parsed = await flowing(turn, prompts)
    case.expect("tokens.jsonl", tokens.kept, TokenFrame)
    case.expect("parsed.jsonl", parsed, ParsedFrame)


def written(text: str, prompt: Prompt, model: ChatModel) -> list[TokenFrame]:
    """The completion ``text`` as an engine gives it: it was cut where it does not end in what ends a turn."""
    token_ids = model.vocabulary.encode(text)
    stopped = token_ids[-1] in model.stop_token_ids or text.endswith(prompt.sampling.stop or "\0")
    return [
        GenerationStarted(prompt.response, prompt.input, len(prompt.token_ids)),
        *(TokenChunk((token,)) for token in token_ids),
        GenerationFinished("stop" if stopped else "length", cached_tokens=0, duration=0.0),
    ]


# What the items say


@every_case
def test_what_a_model_says_is_told(folder: Path) -> None:
    """The recorded items are those that somebody read in the completion."""
    items = items_of(read_frames(folder / "parsed.jsonl", ParsedFrame))
    assert len(items) == len(expected(folder.name)), items
    for item, meant in zip(items, expected(folder.name), strict=True):
        assert item.tells(meant), (item, meant)


def items_of(frames: Iterable[ParsedFrame]) -> list[Told]:
    """The items that frames tell of; their text is whole, and its end is told once."""
    items: list[Told] = []
    is_open = False
    for frame in frames:
        match frame:
            case ReasoningOpened() | MessageOpened() | FunctionCallOpened() | CustomToolCallOpened():
                assert not is_open
                items.append(Told(KINDS[type(frame)], "", getattr(frame, "name", "")))
                is_open = True
            case ItemDelta(text):
                assert is_open
                items[-1] = replace(items[-1], text=items[-1].text + text)
            case ItemClosed(complete):
                assert is_open
                items[-1] = replace(items[-1], complete=complete)
                is_open = False
            case GenerationStarted() | TurnFinished():
                assert not is_open
            case _:
                raise AssertionError(f"no fixture says {frame}")
    return items


KINDS: Mapping[type, Kind] = {
    ReasoningOpened: "thought",
    MessageOpened: "message",
    FunctionCallOpened: "call",
    CustomToolCallOpened: "call",
}


# However it arrives


@cache
def spoken(name: str) -> tuple[GenerationStarted, tuple[int, ...], GenerationFinished]:
    """What begins a recorded turn, all its tokens, and what ends it."""
    start, *chunks, end = read_frames(FIXTURES / name / "tokens.jsonl", TokenFrame)
    return start, tuple(token for chunk in chunks for token in chunk.token_ids), end


async def parsed_in(name: str, borders: Iterable[int], reason: FinishReason | None = None) -> list[ParsedFrame]:
    """What is parsed of the tokens up to the last of ``borders``, which come in chunks that end there."""
    start, token_ids, end = spoken(name)
    chunks = [token_ids[begin:border] for begin, border in pairwise((0, *borders))]
    finish = msgspec.structs.replace(end, reason=reason or end.reason)
    frames = [start, *(TokenChunk(chunk) for chunk in chunks if chunk), finish]
    return await through(ParseChat(chat_model(family_of(name))), frames)


@every_case
@pytest.mark.parametrize("size", [3, 7, 10_000])
async def test_tokens_may_come_in_chunks(folder: Path, size: int) -> None:
    """Items do not depend on how many tokens were ready at a time, nor does the count of tokens."""
    count = len(spoken(folder.name)[1])
    one_by_one = list(read_frames(folder / "parsed.jsonl", ParsedFrame))
    chunked = await parsed_in(folder.name, [*range(size, count, size), count])
    assert items_of(chunked) == items_of(one_by_one)
    assert chunked[-1] == one_by_one[-1]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokens_may_come_in_any_chunks(data: st.DataObject) -> None:
    """Wherever the borders are, the items are the same."""
    name = data.draw(st.sampled_from([case.name for case in CASES]))
    count = len(spoken(name)[1])
    borders = data.draw(st.lists(st.integers(0, count), unique=True).map(sorted))
    whole = items_of(read_frames(FIXTURES / name / "parsed.jsonl", ParsedFrame))
    assert items_of(asyncio.run(parsed_in(name, [*borders, count]))) == whole


# Wherever it ends


@every_case
async def test_a_turn_ends_wherever_it_is_cut(folder: Path) -> None:
    """After any token the limit may come: every item and the turn are ended once, and what was said stays said.

    Each case is cut behind every third of its tokens; those of one family, who write alike, begin in different places.
    """
    whole = items_of(read_frames(folder / "parsed.jsonl", ParsedFrame))
    for count in range(CASES.index(folder) % 3, len(spoken(folder.name)[1]), 3):
        frames = await parsed_in(folder.name, [count], "length")
        assert [type(frame) for frame in frames].count(TurnFinished) == 1
        assert isinstance(frames[-1], TurnFinished)
        assert frames[-1].reason == "length"
        assert frames[-1].output_tokens == count
        check_cut(items_of(frames), whole)


HALF_A_MARK = re.compile(r"\s*<[\w｜]*\Z")
"""What would have become a mark is text, where nothing follows."""


def check_cut(items: list[Told], whole: list[Told]) -> None:
    """All items but the last are those of the whole turn, and the last is the beginning of the next one of them."""
    if not items:
        return
    *ended, last = items
    assert ended == whole[: len(ended)]
    said = HALF_A_MARK.sub("", last.text) if last.kind == "message" else last.text.rstrip()
    if last.kind == "message" and not said:
        return
    meant = whole[len(ended)]
    assert (last.kind, last.name) == (meant.kind, meant.name)
    assert meant.text.startswith(said.rstrip())  # what may come behind white space, nobody knows


# Recordings


@pytest.mark.parametrize("name", ["qwen3_two_calls", "kimi_k2_cut_in_thought"])
def test_a_recording_is_replayed_without_its_vocabulary(
    name: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A replay goes on from what was parsed, and tells the recorded response."""
    monkeypatch.setattr("sys.argv", ["penstock", "replay", "--sse", str(FIXTURES / name)])
    main()
    response = final(read_sse(capsysbinary.readouterr().out))
    assert response == msgspec.json.decode((FIXTURES / name / "response.json").read_bytes(), type=Response)


def test_tokens_are_not_replayed_without_their_vocabulary(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Whoever asks for it is told why not, and gets what follows what was parsed."""
    folder = FIXTURES / "kimi_k2_cut_in_thought"
    monkeypatch.setattr("sys.argv", ["penstock", "replay", "--sse", str(folder), "--from", "parse"])
    main()
    told = capsysbinary.readouterr()
    assert b"only a model of its kind can read its tokens" in told.err
    assert final(read_sse(told.out)) == msgspec.json.decode((folder / "response.json").read_bytes(), type=Response)


def test_the_readme_lists_every_case() -> None:
    """Where each fixture comes from is written down."""
    readme = (FIXTURES / "README.md").read_text()
    listed = {
        name for row in re.findall(r"^\| (`.+?`) \|", readme, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == {case.name.removeprefix(f"{family_of(case.name)}_") for case in CASES} | set(FAMILIES)
