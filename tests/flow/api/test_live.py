"""The routes of the live page: a response with what passes its stages, and recordings, for the operator alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.extensions.workbench.live import live as routes
from penstock.extensions.workbench.live.spelling import Spelling
from penstock.extensions.workbench.live.watch import Watch
from penstock.pipeline.frames import GenerationFinished, TokenChunk
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.recordings.format import CAUSES, FORMAT, LEFT, UNFINISHED, End, Failure, Header, line
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import wait_until
from tests.support.live_server import CLIENT, KEY, Events, bearer, live_server, of, read_events, tokens, watched
from tests.support.server import (
    CALL,
    HELLO,
    WEATHER,
    PacedEngine,
    Server,
    only_recording,
    running_server,
    script,
)


def texts(events: Events) -> dict[str, Any]:
    return {token: spelled for known in of(events, "texts") for token, spelled in known.items()}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server[ScriptedEngine], None]:
    async with live_server(ScriptedEngine(script()), tmp_path) as server:
        yield server


async def test_frames_come_in_the_order_in_which_they_passed(server: Server[ScriptedEngine]) -> None:
    events = await watched(server, {"input": "Hi", "store": False})
    junctions = [name for name, _ in events]
    assert (
        junctions.index("render") < junctions.index("generate") < junctions.index("converse") < junctions.index("emit")
    )
    assert tokens(events) == load_encoding().encode_markup(HELLO)
    known = texts(events)
    assert "".join(known[str(token)]["text"] for token in tokens(events)) == HELLO
    assert known[str(tokens(events)[0])]["mark"]
    assert [each["text"] for each in of(events, "ItemDelta")] == ["A", " greeting", ".", "Hello", "!"]
    hello = next(at for at, (_, data) in enumerate(events) if data.get("text") == "Hello")
    assert events[hello - 1][1]["type"] == "TokenChunk"
    assert events[hello + 1][1]["type"] == "response.output_text.delta"
    assert events[-1] == ("end", {"type": "End", "frames": len([1 for name in junctions if name != "texts"]) - 1})
    times = [data["at"] for name, data in events if "at" in data]
    assert times == sorted(times)


@pytest.mark.parametrize("path", ["server", "watch", "recordings", "recordings/x"])
@pytest.mark.parametrize(
    "headers", [{}, bearer(CLIENT), bearer(""), bearer(f"{KEY}x"), {"Authorization": f"Basic {KEY}"}]
)
async def test_only_the_key_of_the_operator_opens_the_routes(
    server: Server[ScriptedEngine], path: str, headers: dict[str, str]
) -> None:
    method = "POST" if path == "watch" else "GET"
    async with server.client.request(
        method, f"{server.url}/live/{path}", json={"input": "Hi"}, headers=headers
    ) as answer:
        assert answer.status == 401
    assert not server.engine.prompts


async def test_key_of_the_operator_opens_no_route_of_clients(server: Server[ScriptedEngine]) -> None:
    async with server.client.post(f"{server.url}/v1/responses", json={"input": "Hi"}, headers=bearer()) as answer:
        assert answer.status == 401


async def test_without_a_key_of_the_operator_there_are_no_routes(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, resources=("live",)) as server:
        for headers in ({}, bearer(), bearer("")):
            async with server.client.get(f"{server.url}/live/server", headers=headers) as answer:
                assert answer.status == 404
        async with server.client.get(f"{server.url}/live") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")


async def test_open_server_shows_its_stages_to_the_operator_alone(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script()), tmp_path, keys=Keys(operator=KEY)) as server:
        async with server.client.get(f"{server.url}/live/server") as answer:
            assert answer.status == 401
        async with server.client.get(f"{server.url}/live/server", headers=bearer()) as answer:
            described = await answer.json()
    assert (described["models"], described["goes_on"], described["records"]) == (["tiny"], True, False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "background": True}, "background"),
        ({"input": 3}, "input"),
        ({"input": "Hi", "model": "another"}, "model"),
        ({"input": "Hi", "go_on": {"prompt": [1]}}, "go_on.tokens"),
        ({"input": "Hi", "go_on": {"prompt": [], "tokens": [1]}}, "go_on.prompt"),
        ({"input": "Hi", "go_on": {"prompt": [1], "tokens": [-1]}}, "go_on.tokens[0]"),
        ({"input": "Hi", "go_on": {"prompt": [1], "tokens": [2**30]}}, "input"),
        ({"input": "Hi", "go_on": {"prompt": [1], "tokens": [200002]}}, "go_on.tokens"),
        ({"input": "Hi", "go_on": {"prompt": [1], "tokens": [5] * 20}, "max_output_tokens": 20}, "go_on.tokens"),
        ({"input": "Hi", "go_on": {"prompt": [1], "tokens": [5]}, "top_logprobs": 1}, "go_on.tokens"),
    ],
)
async def test_wrong_request_is_refused(server: Server[ScriptedEngine], body: dict[str, Any], param: str) -> None:
    async with server.client.post(f"{server.url}/live/watch", json=body, headers=bearer()) as answer:
        error = (await answer.json())["error"]
        assert (answer.status // 100, error["param"]) == (4, param), error


async def test_turn_that_is_held_to_a_grammar_does_not_go_on(server: Server[ScriptedEngine]) -> None:
    body = {"input": "Hi", "tools": [WEATHER], "tool_choice": "required", "go_on": {"prompt": [1], "tokens": [5]}}
    async with server.client.post(f"{server.url}/live/watch", json=body, headers=bearer()) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "go_on.tokens")


async def test_answer_goes_on_from_any_token(server: Server[ScriptedEngine]) -> None:
    """The parser comes to the middle of an item, and the rest of the same tokens make the same items."""
    ids = load_encoding().encode_markup(HELLO)
    first = await watched(server, {"input": "Hi", "store": False})
    (prompt,) = of(first, "Prompt")
    for count in range(1, len(ids)):
        server.engine.script = Script(ids[count:], weights=[WeightSpan("two", 0, len(ids) - count)])
        go_on = {"prompt": prompt["token_ids"], "tokens": ids[:count]}
        second = await watched(server, {"input": "Hi", "store": False, "go_on": go_on})
        assert server.engine.prompts[-1].token_ids == (*prompt["token_ids"], *ids[:count])
        assert tokens(second) == tokens(first)
        (finished,) = of(second, "GenerationFinished")
        assert finished["weights"] == [{"version": "two", "start": count, "end": len(ids)}]
        for kind in ("ItemDelta", "MessageOpened", "ReasoningOpened", "ItemClosed"):
            assert untimed(of(second, kind)) == untimed(of(first, kind))
        ends = [of(events, "response.completed")[0]["response"] for events in (first, second)]
        assert ends[0]["usage"] == ends[1]["usage"]


def untimed(frames: list[Any]) -> list[Any]:
    return [frame | {"at": 0} for frame in frames]


async def test_answer_goes_on_with_the_tokens_that_are_left(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script()), tmp_path) as server:
        go_on = {"prompt": [1, 2, 3], "tokens": [200005, 17196, 200008, 5]}
        await watched(server, {"input": "Hi", "store": False, "max_output_tokens": 20, "go_on": go_on})
        assert server.engine.prompts[-1].facts.sampling.max_tokens == 16


async def test_limits_hold_for_the_operator(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nrequests_per_minute = 1\n")
    async with live_server(ScriptedEngine(script()), tmp_path, admission=Admission(limits)) as server:
        await watched(server, {"input": "Hi", "store": False})
        async with server.client.post(f"{server.url}/live/watch", json={"input": "Hi"}, headers=bearer()) as answer:
            assert answer.status == 429
        async with server.client.post(
            f"{server.url}/v1/responses", json={"input": "Hi"}, headers=bearer(CLIENT)
        ) as answer:
            assert answer.status == 200


async def test_reader_that_leaves_ends_its_response(tmp_path: Path) -> None:
    engine = PacedEngine(script())
    engine.hold(2)
    async with live_server(engine, tmp_path) as server:
        async with server.client.post(f"{server.url}/live/watch", json={"input": "Hi"}, headers=bearer()) as answer:
            await answer.content.readuntil(b"TokenChunk")
        await server.wait_until_idle()
    assert engine.aborted == 1


async def test_slow_reader_delays_no_token_and_gets_a_note() -> None:
    """The frames beyond the limit are left out, and the response runs to its end."""
    watch = Watch(most=3)

    async def response() -> AsyncGenerator[Any, None]:
        for number in range(10):
            watch.note("generate", TokenChunk((number,)))
            yield number
        watch.note("generate", GenerationFinished("stop", 0, 0.0))

    begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await watch.drive(response(), begun)
    assert (begun.done(), len(watch.waiting), watch.left_out) == (True, 3, 8)
    events = read_events(b"".join([part async for part in watch.lines(Spelling())]).decode())
    assert [name for name, _ in events] == ["generate", "generate", "generate", "left_out", "end"]
    assert events[-2][1] == {"frames": 8}
    assert events[-1][1] == {"type": "End", "frames": 11}


async def test_readers_are_limited_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_WATCHED", 2)
    engine = PacedEngine(script())
    engine.hold(1)
    async with live_server(engine, tmp_path) as server:
        post = partial(server.client.post, f"{server.url}/live/watch", json={"input": "Hi"}, headers=bearer())
        async with post() as one, post() as other, post() as third:
            assert (one.status, other.status, third.status) == (200, 200, 503)
            engine.say_all()
            first, second = read_events(await one.text()), read_events(await other.text())
        assert tokens(first) == tokens(second) == load_encoding().encode_markup(HELLO)
        assert of(first, "response.created")[0]["response"]["id"] != of(second, "response.created")[0]["response"]["id"]


async def test_response_that_fails_is_shown_to_its_end(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(error=RuntimeError("broken")))
    async with live_server(engine, tmp_path) as server:
        events = await watched(server, {"input": "Hi", "store": False})
    assert of(events, "response.failed")
    assert events[-1][0] == "end"


async def test_secrets_are_never_shown(tmp_path: Path) -> None:
    async with (
        live_server(ScriptedEngine(script()), tmp_path) as server,
        server.client.post(
            f"{server.url}/live/watch",
            json={"input": "Hi", "store": False, "cache_salt": "pepper-and-salt"},
            headers=bearer() | {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        ) as answer,
    ):
        text = await answer.text()
    assert "pepper-and-salt" not in text
    assert "0af7651916cd43dd8448eb211c80319c" not in text
    assert KEY not in text
    assert '"owner"' not in text


async def test_recording_is_read_in_the_order_of_its_frames(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script(CALL)), tmp_path, record=True) as server:
        live = await watched(server, {"input": "Hi", "store": False, "tools": [WEATHER]})
        recorded = tmp_path / "recordings"
        await wait_until(lambda: any(recorded.glob("*/response.json")))
        async with server.client.get(f"{server.url}/live/recordings", headers=bearer()) as answer:
            (listed,) = (await answer.json())["data"]
        async with server.client.get(f"{server.url}/live/recordings/{listed['id']}", headers=bearer()) as answer:
            saved = read_events(await answer.text())
        assert listed["id"] == only_recording(recorded).name
        for name in ("..", "%2e%2e", "resp_none", "a%2fb", "..%2f..%2fetc"):
            async with server.client.get(f"{server.url}/live/recordings/{name}", headers=bearer()) as answer:
                assert answer.status in (401, 404), name
    assert saved[0][0] == "recording"
    assert saved[0][1]["request"]["tools"] == [WEATHER]
    assert saved[0][1]["goes_on"]
    assert tokens(saved) == tokens(live)
    assert texts(saved) == texts(live)
    kinds = [[data["type"] for name, data in events if "at" in data] for events in (saved, live)]
    assert [kind for kind in kinds[0] if kind != "ItemTokens"] == [kind for kind in kinds[1] if kind != "ItemTokens"]


async def test_recording_of_another_model_has_no_texts(tmp_path: Path) -> None:
    folder = tmp_path / "recordings" / "resp_1"
    folder.mkdir(parents=True)
    header = line(Header(FORMAT, "another"))
    (folder / "tokens.jsonl").write_bytes(header + line(TokenChunk((5,)), 0.5) + line(TokenChunk((6,)), 0.6)[:9])
    (folder / "parsed.jsonl").write_bytes(header)
    (tmp_path / "recordings" / "no recording").mkdir()
    async with live_server(ScriptedEngine(script()), tmp_path, record=True) as server:
        async with server.client.get(f"{server.url}/live/recordings/resp_1", headers=bearer()) as answer:
            events = read_events(await answer.text())
        (folder / "tokens.jsonl").write_bytes(header + line(TokenChunk((5,))))
        async with server.client.get(f"{server.url}/live/recordings/resp_1", headers=bearer()) as answer:
            assert answer.status == 400
            assert "no times" in (await answer.json())["error"]["message"]
    assert [name for name, _ in events] == ["recording", "generate", "end"]
    assert not events[0][1]["goes_on"]


LATER = Failure("StageFault", "The stage 'ending' of this server raised KeyError.")

ENDS: dict[str, tuple[End | None, End | None, dict[str, Any]]] = {
    "whole": (End(1), End(0), {}),
    "failed": (
        End(1, abandoned=True, cause="raised"),
        End(0, LATER),
        {"failure": msgspec.to_builtins(LATER), "abandoned": True, "cause": "raised", "why": "a later stage raised"},
    ),
    "of an earlier release": (End(1, abandoned=True), End(0, abandoned=True), {"abandoned": True, "why": LEFT}),
    "begun": (None, None, {"unfinished": True, "why": UNFINISHED}),
    "half written": (End(1), None, {"unfinished": True, "why": UNFINISHED}),
    **{
        cause: (
            End(1, abandoned=True, cause=cause),
            End(0, abandoned=True, cause=cause),
            {"abandoned": True, "cause": cause, "why": words},
        )
        for cause, words in CAUSES.items()
    },
}


@pytest.mark.parametrize(("tokens_end", "parsed_end", "told"), ENDS.values(), ids=ENDS)
async def test_end_of_a_recording_says_how_its_files_end(
    tmp_path: Path, tokens_end: End | None, parsed_end: End | None, told: dict[str, Any]
) -> None:
    folder = tmp_path / "recordings" / "resp_1"
    folder.mkdir(parents=True)
    header = line(Header(FORMAT, "another"))
    ends = [b"" if end is None else line(end) for end in (tokens_end, parsed_end)]
    (folder / "tokens.jsonl").write_bytes(header + line(TokenChunk((5,)), 0.5) + ends[0])
    (folder / "parsed.jsonl").write_bytes(header + ends[1])
    async with (
        live_server(ScriptedEngine(script()), tmp_path, record=True) as server,
        server.client.get(f"{server.url}/live/recordings/resp_1", headers=bearer()) as answer,
    ):
        events = read_events(await answer.text())
    assert events[-1] == ("end", {"type": "End", "frames": 1, **told})


async def test_several_readers_get_whole_streams(server: Server[ScriptedEngine]) -> None:
    streams = await asyncio.gather(*(watched(server, {"input": "Hi", "store": False}) for _ in range(5)))
    assert all(tokens(events) == load_encoding().encode_markup(HELLO) for events in streams)
