"""Threads of Messages: conversations that the server holds, so that a client sends only what is new."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pytest

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.messages import PATH, anthropic_client, events_of
from tests.support.server import (
    CALL,
    HELLO,
    PacedServer,
    ScriptedServer,
    recording_server,
    running_server,
    script,
)
from tests.support.server_process import running_process
from tests.support.tool_servers import serving_everything

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"

Json = dict[str, Any]

CREATE: Json = {"thread": {"type": "create"}}
HI: Json = {"role": "user", "content": "How is Paris?"}
AGAIN: Json = {"role": "user", "content": "And now?"}
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKING: Json = {"model": "tiny", "max_tokens": 100, "system": "Be brief.", "tools": [WEATHER], "messages": [HI]}


def after(answer: Json, *messages: Json, **fields: Any) -> Json:
    """The body of a turn that continues an answer."""
    thread = {"type": "continue", "previous_message_id": answer["id"]}
    return {"model": "tiny", "max_tokens": 100, "messages": list(messages), "thread": thread, **fields}


def result(call: Json, text: str | list[Json] = "Sunny") -> Json:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": text}]}


async def whole(served: ScriptedServer, body: Json) -> Json:
    """Return the answer of a turn."""
    answer: Json
    status, answer = await served.post(body, PATH)
    assert status == 200, answer
    return answer


async def refused(served: PacedServer, body: Json) -> tuple[int, str | None]:
    """Return the status and the code of an error."""
    status, answer = await served.post(body, PATH)
    return status, answer.get("error", {}).get("details", {}).get("error_code")


async def test_turn_reads_what_the_whole_conversation_would_be(served: PacedServer) -> None:
    history, answer = [HI], await whole(served, {**ASKING, **CREATE})
    for _ in range(3):
        history += [{"role": "assistant", "content": answer["content"]}, AGAIN]
        answer = await whole(served, after(answer, AGAIN))
        in_thread = served.engine.prompts[-1].token_ids
        await whole(served, {**ASKING, "messages": history})
        assert in_thread == served.engine.prompts[-1].token_ids
        assert answer["usage"]["input_tokens"] == len(in_thread)


async def test_each_prompt_extends_what_the_model_wrote(served: PacedServer) -> None:
    """The store has the tokens of calls, too, which a client's history has not."""
    served.engine.script = script(CALL)
    answer = await whole(served, {**ASKING, **CREATE})
    for _ in range(3):
        answer = await whole(served, after(answer, result(answer["content"][-1])))
    for before, prompt in pairwise(prompt.token_ids for prompt in served.engine.prompts):
        known = (*before, *script(CALL).token_ids)
        assert prompt[: len(known)] == known
    assert served.prompt_text().count("Sunny") == 3


async def test_streamed_turn_is_continued(served: PacedServer) -> None:
    events = events_of(await served.stream({**ASKING, **CREATE, "stream": True}, PATH))
    await whole(served, after(events[0]["message"], AGAIN))
    assert served.prompt_text().count("How is Paris?") == 1


async def test_turn_may_repeat_what_its_thread_began_with(served: PacedServer) -> None:
    begun = await whole(served, {**ASKING, **CREATE})
    same = {"system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER]}
    await whole(served, after(begun, AGAIN, **same))
    for changed, names in (
        ({"system": "Be long."}, "system"),
        ({"tools": [{**WEATHER, "name": "other"}]}, "tools"),
        ({"system": "Be long.", "tools": [{**WEATHER, "description": "x"}]}, "system, tools"),
    ):
        body = after(begun, AGAIN, **changed)
        assert await refused(served, body) == (400, "thread_fingerprint_mismatch")
        _, answer = await served.post(body, PATH)
        assert f"differing field(s): {names}" in answer["error"]["message"]


TOOLS: list[Json] = [
    {**WEATHER, "description": "Get the weather.", "strict": True, "input_examples": [{"city": "Paris"}]},
    {"type": "bash_20250124", "name": "bash"},
    {
        "type": "computer_20251124",
        "name": "computer",
        "display_width_px": 8,
        "display_height_px": 6,
        "enable_zoom": True,
    },
    {"type": "code_execution_20250825", "name": "code_execution"},
    {
        "type": "web_search_20250305",
        "name": "web_search",
        "max_uses": 2,
        "allowed_domains": ["example.com"],
        "user_location": {"type": "approximate", "city": "Paris"},
    },
]


async def test_thread_keeps_tools_of_every_kind(tmp_path: Path) -> None:
    async with serving_everything(tmp_path) as served:
        served.engine.script = script(HELLO)
        begun = await whole(served, {**ASKING, **CREATE, "tools": TOOLS})
        facts = served.engine.prompts[-1].facts
        for repeated in ({}, {"tools": TOOLS}):
            await whole(served, after(begun, AGAIN, **repeated))
            later = served.engine.prompts[-1].facts
            assert (later.tools, later.include, later.options) == (facts.tools, facts.include, facts.options)
            assert later.response.max_tool_calls == 2


FUNCTION: Json = {"type": "function", "name": "get_weather", "parameters": WEATHER["input_schema"]}
OF_RESPONSES: list[tuple[Json, int]] = [
    ({}, 200),
    ({"tools": [FUNCTION]}, 200),
    ({"tools": [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]}, 200),
    ({"tools": [{"type": "custom", "name": "x"}]}, 404),
    ({"tools": [{"type": "namespace", "name": "x", "tools": [FUNCTION]}]}, 404),
    ({"tools": [{"type": "local_shell"}]}, 404),
    ({"tools": [{"type": "apply_patch"}]}, 404),
]


@pytest.mark.parametrize(("fields", "expected"), OF_RESPONSES)
async def test_response_is_a_turn_if_messages_have_its_tools(tmp_path: Path, fields: Json, expected: int) -> None:
    async with serving_everything(tmp_path) as served:
        served.engine.script = script(HELLO)
        status, response = await served.post({"input": "How is Paris?", **fields})
        assert status == 200, response
        status, answer = await served.post(after({"id": response["id"].replace("resp_", "msg_")}, AGAIN), PATH)
        assert (status, answer.get("error", {}).get("details")) == (
            expected,
            None if expected == 200 else {"error_code": "thread_not_found"},
        )


async def test_tools_that_a_turn_defines_stay(served: PacedServer) -> None:
    block = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**WEATHER, "name": "far"}}}
    begun = await whole(served, {**ASKING, **CREATE})
    later = await whole(served, after(begun, {"role": "system", "content": [block]}, AGAIN))
    await whole(served, after(later, AGAIN, tool_choice={"type": "tool", "name": "far"}))
    assert served.prompt_text().count("type far = ") == 1


FAR: Json = {**WEATHER, "name": "far", "defer_loading": True}


async def test_deferred_tool_is_loaded_by_a_turn_and_stays(served: PacedServer) -> None:
    """Claude Code defers tools in each session; each turn repeats those that it knows of."""
    served.engine.script = script(CALL)
    answer = await whole(served, {**ASKING, **CREATE, "tools": [WEATHER, FAR]})
    assert "type far = " not in served.prompt_text()
    found = [{"type": "tool_reference", "tool_name": "far"}]
    for _ in range(2):
        turn = after(answer, result(answer["content"][-1], found), tools=[WEATHER, FAR])
        answer = await whole(served, turn)
        assert served.prompt_text().count("type far = ") == 1
    await whole(served, after(answer, result(answer["content"][-1]), tool_choice={"type": "tool", "name": "far"}))
    without = after(answer, result(answer["content"][-1], found))
    assert await refused(served, without) == (400, "thread_unsupported_request")
    summary = after(answer, result(answer["content"][-1]), compaction={"type": "summarize"})
    status, refusal = await served.post(summary, PATH)
    assert (status, refusal["error"]["message"]) == (400, "compaction: Extra inputs are not permitted")


DELAYED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}
EFFORT = {"role": "system", "content": [], "output_config": {"effort": "low"}}
LATEST_THOUGHTS = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}
UNHELD: list[tuple[str, Json]] = [
    ("max_tokens: 0", {"max_tokens": 0}),
    ("clear_at", {"messages": [HI, {"role": "system", "content": "x", "clear_at": "next_user_message"}]}),
    ("output_config", {"messages": [HI, EFFORT]}),
    ("tool_removal", {"messages": [HI, {"role": "system", "content": [DELAYED]}]}),
    ("tool_reference", {"messages": [HI, {"role": "system", "content": [{**DELAYED, "type": "tool_addition"}]}]}),
    ("context_management", {"context_management": {"edits": [LATEST_THOUGHTS]}}),
]


@pytest.mark.parametrize(("named", "changed"), UNHELD)
async def test_what_a_thread_does_not_hold_is_refused_so_that_clients_go_on_without(
    served: PacedServer, named: str, changed: Json
) -> None:
    status, answer = await served.post({**ASKING, **CREATE, **changed}, PATH)
    details = answer["error"]["details"]
    assert (status, details["error_code"]) == (400, "thread_unsupported_request")
    assert details["unsupported"] == [named]
    assert f"A thread cannot have {named} here" in answer["error"]["message"]
    assert (await served.post({**ASKING, **changed}, PATH))[0] == 200


@pytest.mark.usefixtures("store_at")
async def test_thread_ends_if_the_store_has_not_all_of_it(served: PacedServer) -> None:
    first = await whole(served, {**ASKING, **CREATE})
    second = await whole(served, after(first, AGAIN))
    third = await whole(served, after(second, AGAIN))
    await served.ask("DELETE", f"/v1/responses/{first['id'].replace('msg_', 'resp_')}")
    for gone in (first, second, third, {"id": "msg_unknown"}, {"id": ""}):
        assert await refused(served, after(gone, AGAIN)) == (404, "thread_not_found")


async def test_server_that_keeps_nothing_begins_no_thread(served: PacedServer) -> None:
    """A client sends all from the first refusal on, and would ask in each turn if a thread could begin."""
    served.store.keeps = False
    for body in ({**ASKING, **CREATE}, after({"id": "msg_x"}, AGAIN)):
        status, answer = await served.post(body, PATH)
        assert (status, "(--store none)" in answer["error"]["message"]) == (400, True)
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_thread_belongs_to_its_key(tmp_path: Path) -> None:
    keys = Keys(given=(ALICE, BOB))
    async with (
        running_server(ScriptedEngine(script(HELLO)), tmp_path, keys=keys) as locked,
        anthropic_client(locked.url, ALICE) as alice,
        anthropic_client(locked.url, BOB) as bob,
    ):
        begun = await alice.beta.messages.create(**ASKING, thread={"type": "create"})
        turn = after({"id": begun.id}, AGAIN)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await bob.beta.messages.create(**turn)
        assert "thread_not_found" in str(unknown.value)
        assert (await alice.beta.messages.create(**turn)).stop_reason == "end_turn"


async def test_running_turn_cannot_be_continued(served: PacedServer, claude: anthropic.AsyncAnthropic) -> None:
    served.engine.hold(1)
    async with claude.beta.messages.stream(**ASKING, thread={"type": "create"}) as stream:
        begun = await anext(aiter(stream))
        assert begun.type == "message_start"
        assert await refused(served, after({"id": begun.message.id}, AGAIN)) == (400, "thread_continue_in_flight")
        served.engine.say_all()
        final = await stream.get_final_message()
    await whole(served, after({"id": final.id}, AGAIN))


async def test_result_of_an_unknown_call_is_refused(served: PacedServer) -> None:
    begun = await whole(served, {**ASKING, **CREATE})
    status, answer = await served.post(after(begun, result({"id": "toolu_x"})), PATH)
    assert (status, "(at messages[0]" in answer["error"]["message"]) == (400, True)
    served.engine.script = script(CALL)
    called = await whole(served, after(begun, AGAIN))
    assert (await served.post(after(called, AGAIN), PATH))[0] == 400


async def test_turn_without_messages_goes_on(served: PacedServer) -> None:
    begun = await whole(served, {**ASKING, **CREATE})
    assert (await served.post(after(begun), PATH))[0] == 200
    assert (await served.post({**ASKING, **CREATE, "messages": []}, PATH))[0] == 400


async def test_summary_of_a_thread_is_no_turn_of_it(served: PacedServer) -> None:
    begun = await whole(served, {**ASKING, **CREATE})
    wish = {"compaction": {"type": "summarize"}}
    for body in (after(begun, **wish), {**ASKING, **CREATE, **wish}):
        answer = await whole(served, body)
        assert [block["type"] for block in answer["content"]] == ["compaction"]
        assert "How is Paris?" in served.prompt_text()
        assert await refused(served, after(answer, AGAIN)) == (404, "thread_not_found")
    await whole(served, after(begun, AGAIN))
    assert "Write a summary" not in served.prompt_text()


async def test_thread_of_the_sdk_sends_only_what_is_new(served: PacedServer, claude: anthropic.AsyncAnthropic) -> None:
    thread = claude.beta.messages.thread(model="tiny", max_tokens=100, system="Be brief.", tools=[WEATHER])
    for number in range(3):
        await thread.send({"role": "user", "content": f"Question {number}"})
        assert [served.prompt_text().count(f"Question {each}") for each in range(3)] == [
            int(each <= number) for each in range(3)
        ]
        assert served.prompt_text().count("Be brief.") == 1
    async with thread.stream({"role": "user", "content": "Streamed"}) as stream:
        final = await stream.get_final_message()
    assert thread.previous_message_id == final.id
    await served.ask("DELETE", f"/v1/responses/{final.id.replace('msg_', 'resp_')}")
    await thread.send({"role": "user", "content": "Replayed"})  # the SDK begins another thread with all of it
    assert served.prompt_text().count("Question 0") == 1


async def test_recording_of_a_turn_has_what_its_thread_began_with(tmp_path: Path) -> None:
    async with recording_server(ScriptedEngine(script(HELLO)), tmp_path / "recorded") as served:
        begun = await whole(served, {**ASKING, **CREATE})
        later = await whole(served, after(begun, AGAIN))
    folder = tmp_path / "recorded" / later["id"].replace("msg_", "resp_")
    request = json.loads((folder / "request.json").read_text())
    assert (request["instructions"], [tool["name"] for tool in request["tools"]]) == ("Be brief.", ["get_weather"])
    assert "How is Paris?" in (folder / "conversation.jsonl").read_text()


async def test_thread_is_continued_at_another_server_of_its_store(store_at: str, tmp_path: Path) -> None:
    async with (
        running_process(store_at, tmp_path, "quick@tiny") as first,
        running_process(store_at, tmp_path, "quick@tiny") as second,
    ):
        status, answer = await first.post({**ASKING, **CREATE}, PATH)
        assert status == 200, answer
        for server in (second, first, second):
            before = answer["usage"]["input_tokens"]
            status, answer = await server.post(after(answer, AGAIN), PATH)
            assert status == 200, answer
            assert answer["usage"]["input_tokens"] > before


async def test_thread_is_continued_after_its_server_was_killed(store_at: str, tmp_path: Path) -> None:
    """The server leaves tools out, which a turn may repeat all the same."""
    async with running_process(store_at, tmp_path, "quick@tiny", "--leave-out-tool", "missing") as server:
        status, begun = await server.post({**ASKING, **CREATE, "tools": TOOLS}, PATH)
        assert status == 200
        await server.kill()
        await server.start()
        for repeated in ({}, {"tools": TOOLS}):
            status, answer = await server.post(after(begun, AGAIN, **repeated), PATH)
            assert (status, answer["type"]) == (200, "message")
            assert answer["usage"]["input_tokens"] > begun["usage"]["input_tokens"]
