"""The Messages API over HTTP, as anthropic-python speaks it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest

from penstock.api.http.auth import Keys
from penstock.extensions.dialects.messages.client_tools import client_tool
from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.services.engines.scripted import Script, ScriptedEngine
from tests.support.api_clients import JSON
from tests.support.messages import PATH, anthropic_client, events_of
from tests.support.server import CALL, COUNT, HELLO, ScriptedServer, running_server, script

Json = dict[str, Any]

ASKED: Json = {"role": "user", "content": "How is Paris?"}
ASKING: Json = {"model": "tiny", "max_tokens": 100, "messages": [ASKED]}
WEATHER: Json = {
    "name": "get_weather",
    "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path) as served:
        yield served


async def test_it_answers_plain_and_streamed(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    plain = await claude.messages.create(**ASKING)
    assert [block.type for block in plain.content] == ["thinking", "text"]
    assert (plain.stop_reason, plain.role, plain.model) == ("end_turn", "assistant", "tiny")
    assert plain.id.startswith("msg_")
    assert str(plain._request_id).startswith("req_")  # noqa: SLF001 - the SDK's public name for it
    async with claude.messages.stream(**ASKING) as stream:
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content[1:]] == [block.to_dict() for block in plain.content[1:]]
    assert streamed.usage == plain.usage
    assert served.engine.prompts[0].token_ids == served.engine.prompts[1].token_ids


THOUGHT = CALL.partition("<|start|>")[0]


async def test_each_prompt_extends_the_one_before(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    """The tokens of thoughts come back sealed; a call is written anew, from then on always in the same way."""
    served.engine.script = script(CALL)
    messages, called = [ASKED], None
    for turn in range(4):
        called = await claude.messages.create(**{**ASKING, "messages": messages, "tools": [WEATHER]})
        thought, call = called.content
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert isinstance(call, anthropic.types.ToolUseBlock)
        assert (called.stop_reason, call.input) == ("tool_use", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"Sunny {turn}"}
        text = {"type": "text", "text": f"And {turn}?"}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in called.content]},
            {"role": "user", "content": [text, result]},
        ]
    prompts = [prompt.token_ids for prompt in served.engine.prompts]
    for before, after in pairwise(prompts):
        known = (*before, *script(THOUGHT).token_ids)
        assert after[: len(known)] == known
    assert served.prompt_text().count("Look it up.") == 3
    assert served.prompt_text().index("Sunny 1") < served.prompt_text().index("And 1?")


async def test_a_signature_that_does_not_open_costs_its_thought_alone(
    served: ScriptedServer, claude: anthropic.AsyncAnthropic
) -> None:
    thought = (await claude.messages.create(**ASKING)).content[0].to_dict()
    signature = str(thought["signature"])

    async def prompt_with(*thoughts: Json) -> str:
        tool = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
        answer = {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "Hm."}, tool]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain"}]}
        await claude.messages.create(**{**ASKING, "messages": [ASKED, answer, result], "tools": [WEATHER]})
        return served.prompt_text()

    assert "A greeting." in await prompt_with({**thought, "thinking": ""})
    other_key = "pst1.AAAA" + signature[9:]
    for wrong in (signature[:-9], other_key, "of another maker", ""):
        broken = {"type": "thinking", "thinking": "In plain words.", "signature": wrong}
        assert "In plain words." in await prompt_with(broken)
        assert "greeting" not in await prompt_with(
            {**broken, "thinking": ""}, {"type": "redacted_thinking", "data": "x"}
        )
    both = await prompt_with({**thought, "signature": other_key, "thinking": ""}, {**thought, "thinking": ""})
    assert both.count("A greeting.") == 1


async def test_thoughts_are_shown_as_the_client_asks(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    async def thoughts(**thinking: Any) -> list[str]:
        answer = await claude.messages.create(**ASKING, extra_body={"thinking": thinking})
        return [block.thinking for block in answer.content if block.type == "thinking"]

    assert await thoughts(type="adaptive") == ["A greeting."]
    for budget, effort in ((31_999, "high"), (10_000, "high"), (9_999, "medium"), (5_000, "medium"), (4_999, "low")):
        assert await thoughts(type="enabled", budget_tokens=budget, display="updates") == ["A greeting."]
        assert f"Reasoning: {effort}" in served.prompt_text()
    assert await thoughts(type="adaptive", display="omitted") == [""]
    assert await thoughts(type="disabled") == []
    assert "Reasoning: low" in served.prompt_text()


async def test_the_end_of_a_message_has_its_reason(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    served.engine.script = script(COUNT)
    cut = await claude.messages.create(**{**ASKING, "max_tokens": 12})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 12)
    stopped = await claude.messages.create(**ASKING, stop_sequences=[" 7"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " 7")
    assert stopped.content[-1].to_dict() == {"type": "text", "text": "1 2 3 4 5 6"}
    served.engine.context_length = len(served.engine.prompts[-1].token_ids) + 20
    _, full = await served.post({**ASKING, "max_tokens": 32_000}, PATH)
    assert (full["stop_reason"], full["usage"]["output_tokens"]) == ("model_context_window_exceeded", 20)
    served.engine.script = script("<|channel|>analysis<|message|>Nothing to say.<|end|>")
    silent = await claude.messages.create(**ASKING, extra_body={"thinking": {"type": "disabled"}})
    assert [block.to_dict() for block in silent.content] == [{"type": "text", "text": ""}]


async def test_stream_begins_with_the_tokens_of_the_prompt(served: ScriptedServer) -> None:
    first, *_, ended, _ = events_of(await served.stream(ASKING, PATH))
    used = first["message"]["usage"]
    assert used["input_tokens"] == len(served.engine.prompts[-1].token_ids) == ended["usage"]["input_tokens"]
    assert used["output_tokens"] == 0


async def test_a_prompt_that_is_too_long_is_counted_and_refused(
    served: ScriptedServer, claude: anthropic.AsyncAnthropic
) -> None:
    await claude.messages.create(**ASKING)
    length = len(served.engine.prompts[-1].token_ids)
    served.engine.context_length = length - 1
    counted = await claude.messages.count_tokens(model="tiny", messages=ASKING["messages"])
    assert counted.input_tokens == length
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {length} tokens > {length - 1} maximum"):
        await claude.messages.create(**ASKING)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_completion_tokens": 5}, "There is no parameter 'max_completion_tokens': this API has 'max_tokens'."),
        ({"response_format": {"type": "text"}}, "this API has 'output_config'"),
        ({"store": True}, "There is no parameter 'store'"),
        ({"max_tokens": None}, "(at max_tokens)"),
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "(at messages[0].content[0].type)"),
        ({"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}, "type 'web_fetch_20250910'"),
        ({"tools": [{"name": "f"}]}, "Field required (at tools[0].input_schema)"),
        ({"tool_choice": {"type": "tool"}}, "Field required (at tool_choice.name)"),
    ],
)
async def test_a_wrong_body_is_refused_in_anthropics_form(served: ScriptedServer, changed: Json, message: str) -> None:
    body = {key: value for key, value in {**ASKING, **changed}.items() if value is not None}
    status, answer = await served.post(body, PATH)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in answer["error"]["message"]
    assert answer["request_id"].startswith("req_")


async def test_other_refusals_are_in_anthropics_form(tmp_path: Path) -> None:
    key = "sk-alice-0123456789"
    engine = ScriptedEngine(script(HELLO))
    async with running_server(engine, tmp_path, keys=Keys(given=[key])) as served:
        async with anthropic_client(served.url, key) as claude:
            assert (await claude.messages.create(**ASKING)).stop_reason == "end_turn"
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await claude.messages.create(**{**ASKING, "model": "claude-nothing"})
            assert unknown.value.type == "not_found_error"
        async with anthropic_client(served.url, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await stranger.messages.create(**ASKING)
            assert refused.value.type == "authentication_error"
        bearer = {"Authorization": f"Bearer {key}"}
        for method, path, status, kind in (
            ("GET", PATH, 405, "invalid_request_error"),
            ("POST", f"{PATH}/batches", 404, "not_found_error"),
            ("POST", PATH, 413, "request_too_large"),
        ):
            data = b" " * 200_000 if status == 413 else b"{}"
            async with served.client.request(method, served.url + path, data=data, headers=bearer | JSON) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (status, kind)
                assert answer.headers["request-id"].startswith("req_")


async def test_a_fault_in_mid_stream_is_the_last_event(served: ScriptedServer) -> None:
    served.engine.script = script(HELLO, error=EngineFailed("The engine has failed."))
    stream = await served.stream(ASKING, PATH)
    last = events_of(stream)[-1]
    assert last["error"] == {"type": "api_error", "message": "The engine has failed."}
    status, answer = await served.post(ASKING, PATH)
    assert (status, answer["error"]) == (500, last["error"])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("own", [{}, {"X-Request-Id": "mine"}])
@pytest.mark.parametrize(
    "failing", [script(HELLO, error=EngineFailed("It failed.")), script(HELLO, refusal=EngineOverloaded("It is full."))]
)
async def test_every_error_has_the_id_of_its_request(
    served: ScriptedServer, failing: Script, own: dict[str, str], streams: bool
) -> None:
    served.engine.script = failing
    async with served.client.post(served.url + PATH, json=ASKING | {"stream": streams}, headers=own) as answer:
        body = await answer.read()
        ids = {answer.headers["request-id"], answer.headers["X-Request-Id"]}
    last = events_of(body)[-1] if answer.content_type == "text/event-stream" else json.loads(body)
    assert (last["type"], {last["request_id"]}) == ("error", ids)
    assert not own or ids == {"mine"}


async def test_the_tool_runner_goes_on_in_a_thread(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    served.engine.script = script(CALL)

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the weather."""
        served.engine.script = script(HELLO)
        return f"Sunny in {city}"

    runner = claude.beta.messages.tool_runner(**ASKING, tools=[get_weather])
    final = await runner.until_done()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert "Sunny in Paris" in served.prompt_text()


async def test_deferred_tools_are_loaded_by_their_references(served: ScriptedServer) -> None:
    tools = [{**WEATHER, "name": "far", "defer_loading": True}, WEATHER]
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    assert (await served.post({**ASKING, "tools": [*tools, search]}, PATH))[0] == 200
    before = served.prompt_text()
    assert "type far =" not in before
    call = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "far"}}
    found = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "far"}],
    }
    messages = [ASKED, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    assert (await served.post({**ASKING, "messages": messages, "tools": [*tools, search]}, PATH))[0] == 200
    begun = before.removesuffix("<|start|>assistant")
    assert served.prompt_text().startswith(begun)
    loaded = served.prompt_text().removeprefix(begun).partition("far is available from now on.")[2]
    assert "<|start|>developer<|message|># Tools" in loaded
    assert "type far =" in loaded


async def test_system_messages_stay_in_their_place(served: ScriptedServer) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    texts: list[Any] = ["Tokens left: 5.", [{"type": "text", "text": "Tokens left: 5.", "cache_control": None}]]
    for content in texts:
        messages = [ASKED, {"role": "system", "content": content}, {"role": "assistant", "content": "Fine."}, ASKED]
        assert (await served.post({**ASKING, "system": system, "messages": messages}, PATH))[0] == 200
    one, other = (prompt.token_ids for prompt in served.engine.prompts)
    assert one == other
    text = served.prompt_text()
    assert "billing" not in text
    assert (
        text.index("Be brief.\nBe kind.")
        < text.index("How is Paris?")
        < text.index("Tokens left")
        < text.index("Fine.")
    )


async def test_a_continued_text_has_no_format(served: ScriptedServer) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    begun = {"role": "assistant", "content": "{"}
    status, body = await served.post({**ASKING, "messages": [ASKED, begun], "output_config": form}, PATH)
    assert (status, "cannot be held to a format" in body["error"]["message"]) == (400, True)


async def test_prompt_may_only_be_read(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    warm = await claude.messages.create(**{**ASKING, "max_tokens": 0})
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    assert warm.usage.input_tokens > 0
    assert served.engine.prompts[-1].facts.sampling.max_tokens == 1
    for field in ({"stream": True}, {"tool_choice": {"type": "any"}}):
        status, _ = await served.post({**ASKING, "tools": [WEATHER], "max_tokens": 0, **field}, PATH)
        assert status == 400


async def test_unknown_parameters_are_passed_over(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        status, _ = await served.post({**ASKING, "brand_new": 1, "metadata": {"user_id": "{}"}, "speed": "fast"}, PATH)
    assert status == 200
    assert [message for message in caplog.messages if "brand_new" in message] == [
        "Ignored unknown parameters: brand_new"
    ]


REMINDED: list[dict[str, Any]] = [
    {"role": "user", "content": "One"},
    {"role": "system", "content": "REMINDER"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Three"},
]


@pytest.mark.parametrize(("clear_at", "is_read"), [("next_user_message", False), ("never", True), (None, True)])
async def test_a_reminder_ends_at_the_next_message_of_the_user(
    served: ScriptedServer,
    clear_at: str | None,
    is_read: bool,
) -> None:
    reminder = {**REMINDED[1], "clear_at": clear_at}
    for messages, expected in (
        ([REMINDED[0], reminder, *REMINDED[2:]], is_read),
        ([REMINDED[0], reminder], True),
        ([REMINDED[0], reminder, REMINDED[2], {**REMINDED[3], "content": [{"type": "text", "text": "x"}]}], is_read),
    ):
        assert (await served.post({**ASKING, "messages": messages}, PATH))[0] == 200
        assert ("REMINDER" in served.prompt_text()) == expected
        body = {"model": "tiny", "messages": messages}
        _, counted = await served.post(body, f"{PATH}/count_tokens")
        assert counted["input_tokens"] == len(served.engine.prompts[-1].token_ids)


UNDONE: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**REMINDED[0], "output_config": {"effort": "low"}}]}, "messages.0.output_config"),
    ({"container": "x"}, "container"),
    ({"mcp_servers": [{"type": "url", "name": "x", "url": "https://example.com"}]}, "mcp_servers"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "defer_loading": True}]},
        "tools.0.web_search_20250305.defer_loading",
    ),
    ({"messages": [{**REMINDED[0], "clear_at": "never"}]}, "messages.0.clear_at"),
    ({"thinking": {"type": "adaptive", "block_binding": {}}}, "thinking.adaptive.block_binding"),
    (
        {
            "thinking": {
                "type": "enabled",
                "budget_tokens": 2000,
                "block_binding": {"prefix_mismatch_behavior": "error"},
            }
        },
        "thinking.enabled.block_binding",
    ),
]


@pytest.mark.parametrize(("changed", "path"), UNDONE)
async def test_what_is_not_done_is_refused_in_the_words_on_which_clients_leave_it_out(
    served: ScriptedServer, changed: dict[str, Any], path: str
) -> None:
    status, answer = await served.post({**ASKING, **changed}, PATH)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["message"].startswith(f"{path}: Extra inputs are not permitted")


async def test_a_clear_at_that_does_not_exist_is_refused(served: ScriptedServer) -> None:
    status, answer = await served.post({**ASKING, "messages": [{**REMINDED[1], "clear_at": "soon"}]}, PATH)
    assert (status, "(at messages[0].clear_at)" in answer["error"]["message"]) == (400, True)


async def test_system_message_without_text_is_no_part_of_the_prompt(served: ScriptedServer) -> None:
    for content in ([], "", [{"type": "text", "text": ""}]):
        extra = {"role": "system", "content": content, "output_config": {"effort": None}}
        await served.post({**ASKING, "messages": [*REMINDED, extra]}, PATH)
        await served.post({**ASKING, "messages": REMINDED}, PATH)
        assert served.engine.prompts[-1].token_ids == served.engine.prompts[-2].token_ids


async def test_unknown_keys_of_turns_and_blocks_are_logged(
    served: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{**text, "z": 1}]}
    messages = [
        {"role": "user", "content": [text, {**text, "y": 1}, {**text, "y": 2}], "x": True},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"any": 1}}]},
        {"role": "user", "content": [result], "nothing": None},
    ]
    with caplog.at_level(logging.INFO):
        changed = {"messages": messages, "tools": [{**WEATHER, "u": 1}]}
        assert (await served.post({**ASKING, **changed}, PATH))[0] == 200
    unknown = "messages[0].x, tools[0].u, messages[0].content[1].y, messages[2].content[0].content[0].z"
    assert [line for line in caplog.messages if "Ignored" in line] == [f"Ignored unknown parameters: {unknown}"]


CLIENT_TOOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}),
    ({"type": "bash_20241022", "name": "bash"}, {"restart": True}),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"command": "view", "path": "/a"},
    ),
    ({"type": "text_editor_20250124", "name": "str_replace_editor"}, {"command": "undo_edit", "path": "/a"}),
    ({"type": "memory_20250818", "name": "memory"}, {"command": "rename", "old_path": "/a", "new_path": "/b"}),
    (
        {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"action": "left_click", "coordinate": [1, 2]},
    ),
    (
        {"type": "computer_20251124", "name": "computer", "enable_zoom": True},
        {"action": "zoom", "region": [0, 0, 9, 9]},
    ),
]


@pytest.mark.parametrize(("tool", "given"), CLIENT_TOOLS)
async def test_tools_of_anthropic_that_the_client_runs_are_functions(
    served: ScriptedServer, tool: dict[str, Any], given: dict[str, Any]
) -> None:
    name = tool["name"]
    called = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
    served.engine.script = script(called)
    status, answer = await served.post({**ASKING, "tools": [tool]}, PATH)
    assert status == 200
    [call] = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"], answer["stop_reason"]) == (name, given, "tool_use")
    assert f"type {name} = (_: {{" in served.prompt_text()
    schema: dict[str, Any] = known.schema if (known := client_tool(tool["type"], zooms=True)) else {}
    jsonschema.Draft202012Validator(schema).validate(given)
    served.engine.script = script(HELLO)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
    messages = [*ASKING["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": name}}
    for body in ({"tools": [tool]}, forced):
        assert (await served.post({**ASKING, **body, "messages": messages}, PATH))[0] == 200


@pytest.mark.parametrize("kind", ["bash_1", "memory", "web_fetch_20250910", "tool_search_tool_regex_20251119"])
async def test_other_tools_of_anthropic_are_refused(served: ScriptedServer, kind: str) -> None:
    status, answer = await served.post({**ASKING, "tools": [WEATHER, {"type": kind, "name": "x"}]}, PATH)
    assert (status, "does not run tools of type" in answer["error"]["message"]) == (400, True)
