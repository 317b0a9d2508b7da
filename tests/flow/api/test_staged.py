"""Recordings of the wire are shown by the commands as recordings of the stages: with items, events and their times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench import diff, inspect, replay, shrink
from penstock.extensions.workbench.staged import staged
from penstock.extensions.workbench.wiretap.answers import TURNS, turn_of
from penstock.pipeline.errors import CannotRun, EngineFailed
from penstock.pipeline.frames import (
    CustomToolCallOpened,
    FunctionCallOpened,
    GenerationStarted,
    ItemDelta,
    ParsedFrame,
    TurnFinished,
)
from penstock.pipeline.recordings.format import FORMAT, End, Failure, Header, Recording, Timed, line, read_frames
from penstock.pipeline.recordings.wire import AnswerBegun, WireBody, WireEvent, WireFrame
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.messages import anthropic_client
from tests.support.server import running_server, script
from tests.support.wiretaps import recorded_server

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
)


COUNTED: Any = {"stream_options": {"include_usage": True}}


async def record(where: Path) -> Path:
    """Record a thought and a call in three dialects, as streams and as bodies."""
    async with (
        running_server(ScriptedEngine(script(CALL)), where) as served,
        recorded_server(served.url, where / "recordings") as url,
        openai_client(url) as client,
        anthropic_client(url) as claude,
    ):
        look: Any = {"name": "look", "parameters": SCHEMA}
        chat: Any = {"tools": [{"type": "function", "function": look}], "messages": MESSAGES}
        tool: Any = {"name": "look", "input_schema": SCHEMA}
        for streams in (True, False):
            asked: Any = {"model": "tiny", "stream": streams}
            looks: Any = [{"type": "function", **look}]
            for answer in (
                await client.responses.create(input="Hi", tools=looks, **asked),
                await client.chat.completions.create(**chat, **asked, **(COUNTED if streams else {})),
                await claude.messages.create(messages=MESSAGES, max_tokens=50, tools=[tool], **asked),
            ):
                if streams:
                    assert [event async for event in answer]
    return where / "recordings"


def folders(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def write(folder: Path, dialect: str, frames: list[WireFrame], end: End | None = None, request: Any = None) -> Path:
    """Write a recording of the wire."""
    folder.mkdir()
    if request is not None:
        (folder / "request.json").write_text(json.dumps(request))
    lines = [line(frame, 0.5 + at) for at, frame in enumerate([AnswerBegun(200), *frames])]
    header = Header(FORMAT, "m", dialect=dialect, path="/v1")
    (folder / "wire.jsonl").write_bytes(line(header) + b"".join(lines) + line(end or End(len(lines))))
    return folder


def parsed(path: Path) -> list[ParsedFrame]:
    with staged(path) as (shown, _):
        return list(read_frames(shown / "parsed.jsonl", ParsedFrame))


def texts(frames: list[ParsedFrame]) -> str:
    return "".join(frame.text for frame in frames if isinstance(frame, ItemDelta))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    import asyncio  # noqa: PLC0415

    return folders(asyncio.run(record(tmp_path_factory.mktemp("recorded"))))


def test_items_of_every_dialect_are_the_same(recordings: list[Path]) -> None:
    assert len(recordings) == 6
    for folder in recordings:
        frames = parsed(folder)
        assert isinstance(frames[0], GenerationStarted)
        assert [tool.name for tool in frames[0].facts.tools.tools] == ["look"]
        assert FunctionCallOpened("look") in frames
        assert texts(frames).replace(" ", "") == 'Hm.{"city":"Paris"}'
        assert isinstance(frames[-1], TurnFinished)
        assert frames[-1].output_tokens > 0
        assert frames[-1].prompt_tokens


def test_commands_show_them(recordings: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in recordings:
        replay.main([str(folder)])
        shown = capsys.readouterr()
        assert "function call · look" in shown.out
        assert shown.err == f"penstock: {folder}: it has no tokens: the server did not send them\n"
        inspect.main([str(folder), str(tmp_path / "page.html")])
        assert "look" in (tmp_path / "page.html").read_text()
        assert capsys.readouterr().err == shown.err
    capsys.readouterr()
    diff.main([str(recordings[0]), str(recordings[0])])
    diff.main([str(recordings[0])])
    assert capsys.readouterr().out.count("the same: ") == 2
    replay.main([str(recordings[0]), "--as", "messages"])
    assert "event: message_stop" in capsys.readouterr().out
    with pytest.raises(CannotRun, match="it has no tokens to shrink"):
        shrink.main([str(recordings[0])])


DELTA: Any = {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}
STOP: Any = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
NOTE = "it has no tokens: the server did not send them"


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (End(2), "The recorded answer has no end."),
        (End(2, Failure("EngineFailed", "It broke off.")), "It broke off."),
        (End(2, abandoned=True), "The client left before the end of the answer."),
    ],
)
def test_answer_without_an_end_has_failed(tmp_path: Path, end: End, message: str) -> None:
    folder = write(tmp_path / "r", "chat", [WireEvent(data=DELTA)], end)
    with staged(folder) as (shown, _):
        events = (shown / "events.jsonl").read_text()
    assert "response.failed" in events
    assert message in events


@pytest.mark.parametrize(
    ("request_body", "note"),
    [
        (None, "and no request: it was recorded without texts"),
        ({"model": "m", "messages": 1}, "and penstock refuses its request: "),
        ({"model": "m", "messages": MESSAGES, "audio": {}}, "and penstock refuses its request: "),
        ({"model": "m", "messages": MESSAGES}, ""),
    ],
)
def test_what_is_missing_is_one_line(tmp_path: Path, request_body: Any, note: str) -> None:
    folder = write(tmp_path / "r", "chat", [WireEvent(data=DELTA), WireEvent(data=STOP)], None, request_body)
    with staged(folder / "wire.jsonl") as (_, said):
        assert said.startswith(f"{NOTE}; {note}" if note else NOTE)
        assert bool(note) == (said != NOTE)
    assert texts(parsed(folder)) == "Hel"


def test_continued_response_is_shown_without_the_one_before(tmp_path: Path) -> None:
    item = {"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}
    body = WireBody(data={"output": [item], "status": "completed", "usage": {"input_tokens": 3, "output_tokens": 1}})
    request = {"model": "m", "input": "Hi", "previous_response_id": "resp_" + "0" * 32}
    folder = write(tmp_path / "r", "responses", [body], None, request)
    with staged(folder) as (_, note):
        assert note == NOTE
    assert texts(parsed(folder)) == "Hi"


def test_custom_call_of_a_chat_is_one(tmp_path: Path) -> None:
    call = {"index": 0, "type": "custom", "custom": {"name": "run", "input": "ls"}}
    said: Any = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    frames = parsed(write(tmp_path / "r", "chat", [WireEvent(data=said), WireEvent(data=STOP)]))
    assert CustomToolCallOpened("run") in frames
    assert texts(frames) == "ls"


JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["text", "message", "thinking", "tool_use", "response.completed"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "type", "item", "usage", "content", "output", "message", "index", "error"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(TURNS)), st.lists(JSON, max_size=4), st.booleans())
def test_any_answer_is_a_turn_or_has_failed(dialect: str, values: list[Any], are_events: bool) -> None:
    frames = [WireEvent(data=value) if are_events else WireBody(data=value) for value in values]
    timed = tuple(Timed(frame, number, 0.0) for number, frame in enumerate(frames, start=2))
    recording = Recording(Header(FORMAT, "m", dialect=dialect), timed, End(len(timed)))
    try:
        ended = list(turn_of(recording))
    except EngineFailed:
        return
    assert isinstance(ended[-1][1], TurnFinished)
