"""The page of a recording as text, without a browser."""

from __future__ import annotations

import re
import shutil
import stat
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.page.page import layout_of, page_of, without_folders
from penstock.extensions.workbench.timeline.facts import LONGEST_TITLE, facts_of
from penstock.extensions.workbench.timeline.timeline import Timeline, replayed_or_recorded
from penstock.pipeline.frames import ItemClosed, Prompt, TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import UnreadableRecording, read_recording
from tests.support.processes import RunCommand

HARMONY = Path("fixtures/harmony")
CASES = sorted(path.parent for path in HARMONY.glob("*/tokens.jsonl"))


def data_of(page: str) -> Any:
    found = re.search(r'<script id="layout" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_page_shows_every_recorded_frame_once(case: Path) -> None:
    timeline = await replayed_or_recorded(case)
    layout = layout_of(timeline, case.name)
    for kind, expected in (
        ("tokens", len(layout["tokens"]["texts"])),
        ("events", len(timeline.events)),
        ("frames", len(timeline.items)),
    ):
        numbers = [number for row in layout["rows"] for number in row.get(kind, ())]
        assert sorted(numbers) == list(range(expected))
    recorded = [
        token
        for frame in read_recording(case / "tokens.jsonl", TokenFrame).frames
        if isinstance(frame, TokenChunk)
        for token in frame.token_ids
    ]
    ids = [layout["texts"][number][0] for number in layout["tokens"]["texts"]]
    assert ids == recorded
    assert not timeline.notes
    for row in layout["rows"]:
        closed = timeline.items[row["frames"][-1]].frame if row.get("frames") else None
        if isinstance(closed, ItemClosed) and closed.token_ids:
            assert joined(closed.token_ids) in joined(ids[number] for number in row["tokens"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_recording_named_by_its_id_has_a_title_in_words(case: Path) -> None:
    timeline = await replayed_or_recorded(case)
    response_id = dict(facts_of(timeline))["Response"]
    assert layout_of(timeline, case.name)["name"] == case.name
    for name in (response_id, f"{response_id}-small"):
        title = layout_of(timeline, name)["name"]
        assert response_id not in title
        assert 0 < len(title) <= LONGEST_TITLE + len("...")


async def test_page_says_what_the_user_asked() -> None:
    timeline = await replayed_or_recorded(HARMONY / "weather")
    title = layout_of(timeline, dict(facts_of(timeline))["Response"])["name"]
    assert title in (HARMONY / "weather" / "request.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"at {Path.cwd()}/stages/mine.py:12", "at stages/mine.py:12"),
        ("at /home/me/plugins/mine.py:12; its last frames", "at mine.py:12; its last frames"),
        ("the model '/srv/models/tiny' is away", "the model 'tiny' is away"),
        ("/srv/models/tiny", "tiny"),
        ("replay:/srv/recorded/answer, /srv/plugins/engines.py:noisy", "replay:answer, engines.py:noisy"),
        (
            "see http://host:8000/v1/models, and docs/STAGES.md",
            "see http://host:8000/v1/models, and docs/STAGES.md",
        ),
        ("1/2 of a/b", "1/2 of a/b"),
    ],
)
def test_page_has_no_folders_of_the_machine(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def joined(token_ids: Iterable[int]) -> str:
    return f" {' '.join(map(str, token_ids))} "


@given(st.text())
def test_recorded_text_is_escaped(text: str) -> None:
    page = page_of({"name": text, "facts": [text]})
    assert data_of(page) == {"name": text, "facts": [text]}
    assert page.count("<script") == 2
    title = re.search(r"<title>(.*?) · penstock</title>", page, re.DOTALL)
    assert title is not None
    assert unescape(title[1]) == text


def test_page_is_self_contained() -> None:
    page = page_of({"name": "x"})
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)
    assert policy is not None
    for content in re.findall(r"<(?:style|script)>(.*?)</", page, re.DOTALL):
        assert b64encode(sha256(content.encode()).digest()).decode() in unescape(policy[1])
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)


async def copied(case: str, folder: Path, *names: str) -> Timeline:
    for name in names:
        shutil.copy(HARMONY / case / name, folder)
    return await replayed_or_recorded(folder)


async def test_recording_of_events_alone_is_shown(tmp_path: Path) -> None:
    timeline = await copied("function_call", tmp_path, "events.jsonl")
    assert timeline.events
    assert not timeline.items
    layout = layout_of(timeline, "x")
    assert sum(len(row.get("events", ())) for row in layout["rows"]) == len(timeline.events)
    assert layout["request"]["tools"] == "get_weather"


async def test_recording_of_a_prompt_alone_is_shown(tmp_path: Path) -> None:
    timeline = await copied("function_call", tmp_path, "prompt.jsonl")
    prompt = read_recording(tmp_path / "prompt.jsonl", Prompt).frames[0]
    assert layout_of(timeline, "x")["prompts"][0]["count"] == len(prompt.token_ids)
    assert timeline.notes


async def without_model(folder: Path, *names: str) -> Timeline:
    header = b'{"type":"Recording","format":2,"model":"m","encoding":"chat"}\n'
    for name in names:
        _, *lines = (HARMONY / "function_call" / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([header, *lines]))
    return await replayed_or_recorded(folder)


async def test_recording_without_its_model_shows_token_numbers(tmp_path: Path) -> None:
    timeline = await without_model(tmp_path, "tokens.jsonl", "parsed.jsonl")
    layout = layout_of(timeline, "x")
    titles = [row["title"] for row in layout["rows"] if row["kind"] == "item"]
    assert titles == ["reasoning", "function call · get_weather"]
    assert {layout["texts"][number][1] for number in layout["tokens"]["texts"]} == {None}
    assert "does not say where its model is" in " ".join(timeline.notes)


async def test_tokens_are_shown_without_model_and_items(tmp_path: Path) -> None:
    layout = layout_of(await without_model(tmp_path, "tokens.jsonl"), "x")
    assert sum(len(row.get("tokens", ())) for row in layout["rows"]) == 32


async def test_events_that_differ_from_replay_are_noted(tmp_path: Path) -> None:
    events = (HARMONY / "function_call" / "events.jsonl").read_bytes()
    shutil.copy(HARMONY / "function_call" / "tokens.jsonl", tmp_path)
    (tmp_path / "events.jsonl").write_bytes(events.replace(b'"delta":" call"', b'"delta":" CALL"'))
    assert "from number 6 on" in (await replayed_or_recorded(tmp_path)).difference


def test_inspect_writes_a_private_page_and_prints_its_path(penstock: RunCommand, tmp_path: Path) -> None:
    page, stage = tmp_path / "there.html", tmp_path / "stage.py"
    stage.write_text("def install(pipeline):\n    return pipeline\n")
    assert penstock("inspect", HARMONY / "greeting", "--with", f"{stage}:install", page).out.decode() == f"{page}\n"
    assert data_of(page.read_text("utf-8"))["name"] == "greeting"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_broken_recording_is_reported_with_file_and_line(penstock: RunCommand, tmp_path: Path) -> None:
    lines = (HARMONY / "greeting" / "tokens.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "tokens.jsonl").write_bytes(b"".join([*lines[:3], b"nonsense\n", *lines[4:]]))
    ended = penstock("inspect", tmp_path)
    assert ended.status == 2
    assert ended.err.startswith(f"penstock: {tmp_path}/tokens.jsonl:4: ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--with", "nothing"], "--with nothing: "),
        (["nowhere/page.html"], "nowhere/page.html: the page cannot be written: "),
    ],
)
def test_unusable_arguments_are_one_line_errors(penstock: RunCommand, arguments: list[str], problem: str) -> None:
    ended = penstock("inspect", HARMONY / "greeting", *arguments)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"penstock: {problem}")


async def test_folder_without_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecording):
        await replayed_or_recorded(tmp_path)
