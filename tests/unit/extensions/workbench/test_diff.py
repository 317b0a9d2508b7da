"""``penstock diff``: differences of two recordings are found, insignificant ones are ignored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import cycle, groupby, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.cli.recorded_model import model_of
from penstock.api.cli.replayer import replay_of
from penstock.extensions.workbench.diff import comparisons, context, recorded_lines, replayed_lines
from penstock.pipeline.core import source_of
from penstock.pipeline.frames import GenerationStarted, ItemDelta, TokenChunk, TokenFrame
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.comparison import Line, first_difference, is_chunked_alike
from penstock.pipeline.recordings.format import FORMAT, End, Header, read_frames, write_frames
from penstock.pipeline.trace import traced
from tests.support.paths import CHAT, HARMONY
from tests.support.processes import RunCommand

CASES = sorted(HARMONY.glob("*/"), key=lambda case: case.name)
RECORDING = HARMONY / "function_call"
CHAT_CALL = CHAT / "gemma4_call"
NAMES = ["function_call", "greeting", "served_python", "stray_markers_in_content", "logprobs"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_recording_equals_its_replay(case: Path) -> None:
    lines = recorded_lines(case)
    again = replayed_lines(await replay_of(case))
    for exact in (False, True):
        assert all(first_difference(lines[stage], lines[stage], exact=exact) is None for stage in lines)
        assert all(first_difference(each.one, each.other, exact=exact) is None for each in comparisons(lines, again))


def changed(frame: Any) -> Any:
    """A different frame of the same class."""
    match frame:
        case TokenChunk():
            return msgspec.structs.replace(frame, token_ids=(frame.token_ids[0] + 1, *frame.token_ids[1:]))
        case ItemDelta():
            return msgspec.structs.replace(frame, text=f"~{frame.text[1:]}")
        case _ if hasattr(frame, "delta"):
            return msgspec.structs.replace(frame, delta=f"~{frame.delta[1:]}")
        case Event():
            return msgspec.structs.replace(frame, sequence_number=frame.sequence_number + 1000)
        case _:
            return None


@given(st.sampled_from(NAMES), st.sampled_from(["generate", "parse", "emit"]), st.data(), st.booleans())
def test_changed_frame_is_found_with_its_line(name: str, stage: str, data: st.DataObject, exact: bool) -> None:
    lines = recorded_lines(HARMONY / name)[stage]
    at = data.draw(st.sampled_from([at for at, each in enumerate(lines) if changed(each.frame)]))
    other = [*lines[:at], Line(changed(lines[at].frame), lines[at].number), *lines[at + 1 :]]
    found = first_difference(lines, other, exact=exact)
    assert found is not None
    assert (found.here.line, found.there.line) == (lines[at].number, lines[at].number)


@given(st.sampled_from(NAMES), st.lists(st.integers(1, 9), min_size=1))
async def test_rechunked_tokens_are_no_difference(name: str, sizes: list[int]) -> None:
    frames = list(read_frames(HARMONY / name / "tokens.jsonl", TokenFrame))
    others = list(rechunked(frames, cycle(sizes)))
    lines = [await through(made) for made in (frames, others)]
    for one, other in zip(*lines, strict=True):
        assert first_difference(one, other, exact=False) is None
    one, other = lines[0][0], lines[1][0]
    assert is_chunked_alike(one, other) == (first_difference(one, other, exact=True) is None) == (frames == others)


def rechunked(frames: list[TokenFrame], sizes: Iterator[int]) -> Iterator[TokenFrame]:
    for is_chunk, group in groupby(frames, lambda frame: isinstance(frame, TokenChunk)):
        if not is_chunk:
            yield from group
            continue
        chunks = [chunk for chunk in group if isinstance(chunk, TokenChunk)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        while tokens:
            size = next(sizes)
            yield TokenChunk(tuple(tokens[:size]), tuple(logprobs[:size]))
            tokens, logprobs = tokens[size:], logprobs[size:]


async def through(frames: list[TokenFrame]) -> list[list[Line]]:
    """Recorded frames after each stage: tokens, parsed frames, and events if there is only one turn."""
    model = model_of(Header(FORMAT))
    is_one_turn = sum(isinstance(frame, GenerationStarted) for frame in frames) == 1
    pipeline = model.pipeline.from_stage("parse").through("emit" if is_one_turn else "parse")
    trace = await traced(pipeline, source_of(frames))
    return [
        [Line(frame, number) for number, frame in enumerate([*crossed.frames, End(len(crossed.frames))], start=2)]
        for crossed in trace.junctions
    ]


def test_ids_and_times_are_no_difference_unless_compared_exactly(penstock: RunCommand, tmp_path: Path) -> None:
    for path in RECORDING.glob("*.jsonl"):
        text = path.read_text().replace("66756e6374696f6e5f63616c6c000000", "0123456789abcdef0123456789abcdef")
        text = text.replace("1790000000", "1790000077").replace('"duration":0.71', '"duration":3.14')
        (tmp_path / path.name).write_text(text)
    assert penstock("diff", RECORDING, tmp_path).status == 0
    result = penstock("diff", RECORDING, tmp_path, "--exact")
    assert result.status == 1
    assert result.out.startswith(
        b"conversation.jsonl:2: ResolvedRequest facts.response.id 'resp_66756e6374696f6e5f63616c6c000000' != "
    )


def test_reference_to_another_item_is_a_difference(penstock: RunCommand, tmp_path: Path) -> None:
    events = RECORDING / "events.jsonl"
    wrong = events.read_text().replace('"sequence_number":9,"item_id":"rs_6', '"sequence_number":9,"item_id":"rs_5')
    (tmp_path / "events.jsonl").write_text(wrong)
    result = penstock("diff", events, tmp_path / "events.jsonl")
    assert result.status == 1
    assert result.out.startswith(b"events.jsonl:12: response.reasoning_text.delta item_id ")


def test_first_differing_junction_is_reported(penstock: RunCommand, tmp_path: Path) -> None:
    shutil.copytree(RECORDING, tmp_path, dirs_exist_ok=True)
    parsed = tmp_path / "parsed.jsonl"
    parsed.write_text(parsed.read_text().replace('"Paris"', '"paris"'))
    result = penstock("diff", RECORDING, tmp_path, "--context", "1")
    assert (result.status, result.err) == (1, "")
    assert result.out.decode().splitlines() == [
        "parsed.jsonl:17: ItemDelta text 'Paris' != 'paris'",
        '    16  {"type":"ItemDelta","text":"\\":\\""}',
        '-   17  {"type":"ItemDelta","text":"Paris"}',
        "                                    ^",
        '+   17  {"type":"ItemDelta","text":"paris"}',
        "                                    ^",
    ]
    assert penstock("diff", tmp_path).out.startswith(b"parsed.jsonl:17: ")


@given(st.text(max_size=300), st.text(max_size=300), st.booleans())
def test_context_marks_the_first_different_character(before: str, after: str, exact: bool) -> None:
    one, other = ([Line(ItemDelta(f"{before}{each}{after}"), 2), Line(End(1), 3)] for each in "ab")
    difference = first_difference(one, other, exact=exact)
    assert difference is not None
    line, mark, other_line, other_mark = context(one, other, difference, 1)
    assert (line[mark.index("^")], other_line[other_mark.index("^")]) == ("a", "b")


SHOUT = """
from collections.abc import AsyncGenerator, AsyncIterator
from msgspec.structs import replace
from penstock.pipeline.frames import EmittedFrame
from penstock.pipeline.protocol.events import DELTAS, ResponseEvent

async def shout(source: AsyncIterator[Frame]) -> AsyncGenerator[Frame, None]:
    async for frame in source:
        yield replace(frame, delta=frame.delta.upper()) if type(frame) in DELTAS else frame

def install(pipeline):
    return pipeline.insert_after("PLACE", "shout", shout)
"""


@pytest.mark.parametrize(("place", "frames"), [("emit", "EmittedFrame"), ("persist", "ResponseEvent")])
def test_what_comes_out_last_is_compared(penstock: RunCommand, tmp_path: Path, place: str, frames: str) -> None:
    (tmp_path / "stage.py").write_text(SHOUT.replace("PLACE", place).replace("[Frame", f"[{frames}"))
    with_stage = ("--with", f"{tmp_path / 'stage.py'}:install")
    found = penstock("diff", RECORDING, *with_stage)
    difference = "response.reasoning_text.delta delta ' should' != ' SHOULD'"
    cause = "recorded != replayed, after shout, from tokens.jsonl:7 ' should'"
    assert found.out.decode() == f"events.jsonl:8: {difference} ({cause})\n"
    assert found.status == 1
    assert penstock("diff", RECORDING, *with_stage, "--to", place).status == 0
    recorded = shutil.copytree(RECORDING, tmp_path / "recorded")
    (recorded / "sent.jsonl").write_bytes(penstock("replay", RECORDING, *with_stage, "--json").out)
    assert penstock("diff", recorded, *with_stage).status == 0
    for pair in ((recorded,), (recorded, RECORDING)):
        found = penstock("diff", *pair)
        sides = b"" if pair[1:] else b" (recorded != replayed, from tokens.jsonl:7 ' should')"
        assert found.out == b"sent.jsonl:7: response.reasoning_text.delta delta ' SHOULD' != ' should'" + sides + b"\n"
    assert penstock("diff", RECORDING, recorded).status == 1


def test_stage_that_has_changed_since_the_recording_is_named(penstock: RunCommand, tmp_path: Path) -> None:
    whispering = SHOUT.replace("PLACE", "emit").replace("[Frame", "[EmittedFrame").replace("upper()", "title()")
    (tmp_path / "before.py").write_text(whispering)
    (tmp_path / "now.py").write_text(whispering.replace("title()", "upper()"))
    recorded = shutil.copytree(RECORDING, tmp_path / "recorded")
    sent = penstock("replay", RECORDING, "--with", f"{tmp_path / 'before.py'}:install", "--json").out
    (recorded / "sent.jsonl").write_bytes(sent)
    found = penstock("diff", recorded, "--with", f"{tmp_path / 'now.py'}:install")
    assert b"(recorded != replayed, after shout, from tokens.jsonl:" in found.out
    (tmp_path / "idle.py").write_text(whispering.replace(".title()", ""))
    found = penstock("diff", recorded, "--with", f"{tmp_path / 'idle.py'}:install")
    assert b"(recorded != replayed, from tokens.jsonl:" in found.out  # it changes nothing


def test_different_chunking_is_noted(penstock: RunCommand, tmp_path: Path) -> None:
    frames = list(read_frames(RECORDING / "tokens.jsonl", TokenFrame))
    write_frames(tmp_path / "tokens.jsonl", rechunked(frames, repeat(4)), Header(FORMAT, "tiny-gpt-oss"))
    result = penstock("diff", RECORDING, tmp_path)
    assert (result.status, result.out) == (0, b"the same: tokens.jsonl (34 frames, in other pieces)\n")


def test_junctions_without_replay_are_reported(penstock: RunCommand) -> None:
    result = penstock("diff", CHAT_CALL)
    assert (result.status, result.out) == (0, b"the same: events.jsonl (24 frames)\n")
    assert result.err.startswith(f"penstock: {CHAT_CALL}: the tokens cannot be parsed without their model")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing", RECORDING], "penstock: nothing: no such file or folder"),
        (
            [RECORDING / "tokens.jsonl", RECORDING / "parsed.jsonl"],
            "penstock: nothing to compare: one recording has tokens.jsonl, the other parsed.jsonl",
        ),
        ([RECORDING, RECORDING, "--from", "emit"], "penstock: --from, --to and --with are for a replay"),
        ([RECORDING, "--from", "nothing"], "penstock: a replay can begin with"),
    ],
)
def test_incomparable_recordings_are_one_line_errors(
    penstock: RunCommand, arguments: list[object], reason: str
) -> None:
    ended = penstock("diff", *arguments)
    assert (ended.status, ended.out) == (2, b"")
    assert ended.err.startswith(reason)
    assert ended.err.count("\n") == 1
