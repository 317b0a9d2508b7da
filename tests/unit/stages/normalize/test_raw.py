from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from msgspec import UNSET, UnsetType

from penstock.extensions.tools.browser.page_stack import PageStack, Visit
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.render.harmony.messages import harmony_conversation
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support.request_bodies import CLIENTS, WEATHER
from tests.support.requests import ALL_HOSTED, ALL_LEFT_OUT, normalize, normalize_cost

Json: TypeAlias = dict[str, Any]

SAY: Json = {"type": "custom", "name": "say"}
CALL = {"role": "assistant", "recipient": "functions.f", "channel": "commentary", "content": "{}"}
RESULT = {"role": "tool", "name": "functions.f", "content": "x"}


def text(content: str) -> list[Json]:
    return [{"type": "text", "text": content}]


def author(role: str, name: str | None = None) -> Json:
    return {"author": {"role": role, "name": name}}


def message(role: wire.Role, part: wire.InputText | wire.OutputText, *phase: wire.Phase) -> wire.Message:
    return wire.Message("msg_1p0000", "completed", role, (part,), *phase)


def called(name: str, namespace: str | UnsetType = UNSET) -> wire.FunctionCall:
    return wire.FunctionCall("fc_1p0000", "call_1p0000", name, "{}", "completed", namespace)


def custom(name: str) -> wire.CustomToolCall:
    return wire.CustomToolCall("ctc_1p0000", "call_1p0000", name, "{}", "completed")


def chat_calls(*ids: str, **more: Any) -> Json:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def chat_result(call_id: str, content: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


HI = message("user", wire.InputText("Hi"))
KIND = message("developer", wire.InputText("Be kind."))
HM = wire.Reasoning("rs_1p0000", content=(wire.ReasoningText("Hm."),), status="completed")
DEVELOPER = {"type": "developer_content", "instructions": "Be kind.", "tools": {}}
TOOLS = "# Tools\n\n## functions\n\n..."


@pytest.mark.parametrize(
    ("raw", "item"),
    [
        ({"role": "user", "content": "Hi"}, HI),
        ({**author("user"), "content": [*text("H"), *text("i")]}, HI),
        ({"role": "system", "content": text("You are ChatGPT")}, None),
        ({"role": "system", "content": [{"type": "system_content", "model_identity": "You are ChatGPT"}]}, None),
        ({"role": "developer", "content": text(f"# Instructions\n\nBe kind.\n\n{TOOLS}")}, KIND),
        ({"role": "developer", "content": [DEVELOPER]}, KIND),
        ({"role": "developer", "content": text(TOOLS)}, None),
        ({"role": "assistant", "channel": "analysis", "content": text("Hm.")}, HM),
        (
            {"role": "assistant", "channel": "commentary", "content": text("Wait.")},
            message("assistant", wire.OutputText("Wait."), "commentary"),
        ),
        (
            {"role": "assistant", "channel": "final", "content": text("Yes.")},
            message("assistant", wire.OutputText("Yes."), "final_answer"),
        ),
        (CALL, called("f")),
        ({**CALL, "recipient": "agents.spawn"}, called("spawn", "agents")),
        ({**CALL, "recipient": "functions.wait"}, called("wait", "functions")),
        ({**CALL, "recipient": "python"}, wire.CodeInterpreterCall("ci_1p0000", "{}", "", "incomplete")),
        ({**CALL, "recipient": "browser.search"}, called("search", "browser")),
        ({**CALL, "recipient": "functions.say"}, custom("say")),
        ({**CALL, "content_type": "code"}, custom("f")),
    ],
    ids=str,
)
async def test_raw_messages_become_items(store: Store, raw: Json, item: wire.Item | None) -> None:
    tools = [WEATHER, SAY, {"type": "namespace", "name": "functions", "tools": [{"type": "function", "name": "wait"}]}]
    resolved = await normalize(store, input="Go on", previous_input_messages=[raw], tools=tools)
    assert resolved.facts.input[:-1] == ((item,) if item else ())
    assert resolved.history == ()


async def test_outputs_find_their_calls(store: Store) -> None:
    """An output answers the first open call of its name, or else the latest one."""
    messages = [
        CALL,
        {**CALL, "recipient": "functions.g"},
        {**CALL, "recipient": "functions.say"},
        RESULT,
        {**RESULT, "name": None},
        {**RESULT, **author("tool", "functions.g")},
    ]
    resolved = await normalize(store, previous_input_messages=messages, tools=[SAY])
    assert resolved.facts.input[3:] == (
        wire.FunctionCallOutput("fco_1p0003", "call_1p0000", "x", "completed"),
        wire.CustomToolCallOutput("ctco_1p0004", "call_1p0002", "x", "completed"),
        wire.FunctionCallOutput("fco_1p0005", "call_1p0001", "x", "completed"),
    )


TWO = "Be kind.\n\nAnd brief."


@pytest.mark.parametrize(
    ("instructions", "left"),
    [
        ("Be kind.", ["And brief."]),
        (TWO, []),
        ("Be", []),
        ("Be kind.\n", []),
        ("Be rude.", []),
        ("", [TWO]),
        (None, [TWO]),
    ],
)
async def test_new_instructions_replace_those_of_the_old_prompt(
    store: Store, instructions: str | None, left: list[str]
) -> None:
    """A message of the developer that followed the same instructions, as whole paragraphs, stays."""
    message = {"role": "developer", "content": f"# Instructions\n\n{TWO}"}
    resolved = await normalize(store, input="Hi", instructions=instructions, previous_input_messages=[message])
    assert [item.text for item in resolved.facts.input[:-1] if isinstance(item, wire.Message)] == left


async def test_developer_messages_within_the_old_prompt_stay(store: Store) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "developer", "content": "# Instructions\n\nBe kind."}]
    resolved = await normalize(store, input="Hi", instructions="Be rude.", previous_input_messages=messages)
    assert [item.text for item in resolved.facts.input if isinstance(item, wire.Message)] == ["Hi", "Be kind.", "Hi"]


def built_in(recipient: str, arguments: str) -> Json:
    call = {"role": "assistant", "name": None, "channel": "analysis", "recipient": recipient, "content_type": "code"}
    return {**call, "content": text(arguments)}


def result(recipient: str, content: str) -> Json:
    returned = {"role": "tool", "name": recipient, "channel": "analysis", "recipient": "assistant"}
    return {**returned, "content": text(content)}


BUILT_IN_CALLS = {
    "python": ("print( 1 )\n", "1\n\n"),
    "browser.search": ('{"query":"x", "topn": 3}', "[0] x\n**viewing lines [0 - 1] of 9**"),
    "browser.open": ('{"id": 2, "cursor":0}', "[1] Größe (https://a.example/)"),
    "browser.find": ('{ "pattern": "<|call|>"}', ""),
    "container.exec": ('{"cmd":["bash","-lc","ls"], "workdir": "/"}', "a\n\n"),
}
"""Arguments and results in words that the items of the API cannot hold."""


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("left_out", [frozenset(), ALL_LEFT_OUT])
async def test_calls_of_built_in_tools_round_trip(store: Store, left_out: frozenset[str], parallel: bool) -> None:
    user = {"role": "user", "name": None, "content": text("Hi")}
    calls = [built_in(recipient, arguments) for recipient, (arguments, _) in BUILT_IN_CALLS.items()]
    results = [result(recipient, content) for recipient, (_, content) in BUILT_IN_CALLS.items()]
    paired = [message for pair in zip(calls, results, strict=True) for message in pair]
    tools = [{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "web_search"}]
    resolved = await normalize(
        store,
        hosted=ALL_HOSTED,
        left_out=left_out,
        tools=tools,
        enable_response_messages=True,
        previous_input_messages=[user, *([*calls, *results] if parallel else paired)],
    )
    prompt = RenderHarmony(load_encoding()).prompt(resolved)
    assert prompt.raw_messages is not None
    assert list(prompt.raw_messages[1:]) == [user, *paired]
    assert (
        load_encoding().decode(prompt.token_ids).partition("Hi<|end|>")[2]
        == "".join(
            f"<|start|>assistant to={recipient}<|channel|>analysis code<|message|>{arguments}<|call|>"
            f"<|start|>{recipient} to=assistant<|channel|>analysis<|message|>{content}<|end|>"
            for recipient, (arguments, content) in BUILT_IN_CALLS.items()
        )
        + "<|start|>assistant"
    )
    ran = (wire.CodeInterpreterCall, *[wire.WebSearchCall] * 3, wire.ShellCall, wire.ShellCallOutput)
    assert tuple(map(type, resolved.facts.input[1:])) == ran


async def test_function_of_the_operators_browser_round_trips(store: Store) -> None:
    """Its server may offer functions beyond those of the training."""
    user = {"role": "user", "name": None, "content": text("Hi")}
    messages = [user, built_in("browser.screenshot", '{"id": 1}'), result("browser.screenshot", "A cat.")]
    sent: dict[str, Any] = {"tools": [{"type": "web_search"}], "previous_input_messages": messages}
    resolved = await normalize(store, hosted=ALL_HOSTED, enable_response_messages=True, **sent)
    prompt = RenderHarmony(load_encoding()).prompt(resolved)
    assert prompt.raw_messages is not None
    assert list(prompt.raw_messages[1:]) == messages
    assert isinstance((await normalize(store, **sent, left_out=ALL_LEFT_OUT)).facts.input[1], wire.CustomToolCall)


async def test_browser_finds_the_pages_of_raw_messages(store: Store) -> None:
    """The headings of the results say which pages the cursors mean."""
    messages = [
        message
        for recipient, (arguments, content) in BUILT_IN_CALLS.items()
        for message in (built_in(recipient, arguments), result(recipient, content))
    ]
    stack = PageStack(await normalize(store, previous_input_messages=messages))
    assert [stack.at(cursor) for cursor in (0, 1)] == [Visit("x", query="x"), Visit("Größe", "https://a.example/")]


async def test_built_in_call_without_a_result_is_not_rendered(store: Store) -> None:
    messages = [{"role": "user", "content": "Hi"}, *(built_in(name, "{}") for name in BUILT_IN_CALLS)]
    prompt = RenderHarmony(load_encoding()).prompt(await normalize(store, previous_input_messages=messages))
    assert load_encoding().decode(prompt.token_ids).endswith("Hi<|end|><|start|>assistant")


async def test_function_of_the_client_may_have_the_name_of_a_built_in_tool(store: Store) -> None:
    function = {"type": "function", "name": "python"}
    resolved = await normalize(store, previous_input_messages=[built_in("python", "{}")], tools=[function])
    assert isinstance(resolved.facts.input[0], wire.CustomToolCall)


def test_outputs_find_calls_in_constant_time() -> None:
    calls = [{**CALL, "recipient": f"functions.f{number}"} for number in range(400)]
    outputs = [{**RESULT, "name": f"functions.f{number}"} for number in range(400)]
    in_order = normalize_cost(previous_input_messages=[*calls, *outputs])
    assert normalize_cost(previous_input_messages=[*calls, *reversed(outputs)]) < 2.5 * in_order


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([RESULT], "previous_input_messages[0]"),
        ([CALL, RESULT, RESULT], "previous_input_messages[2]"),
        ([{"content": "x"}], "previous_input_messages[0].role"),
        ([{"role": "user", "content": None}], "previous_input_messages[0].content"),
        ([chat_calls("a", role="user")], "previous_input_messages[0]"),
        ([chat_calls("a"), chat_result("b", "x")], "previous_input_messages[1].tool_call_id"),
        ([chat_calls("a"), chat_result("a", "x"), chat_result("a", "x")], "previous_input_messages[2].tool_call_id"),
    ],
)
async def test_malformed_raw_message_is_refused(store: Store, messages: list[Json], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, previous_input_messages=messages)
    assert caught.value.param == param


async def test_chat_messages_with_calls_become_items(store: Store) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        chat_calls("a", "b", content="Wait.", reasoning="Hm."),
        chat_result("b", "2"),
        chat_result("a", "1"),
        {"role": "assistant", "content": "Yes.", "reasoning": "So."},
    ]
    resolved = await normalize(store, previous_input_messages=messages, input="Go on")
    prompt = RenderHarmony(load_encoding()).prompt(resolved)
    call = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert load_encoding().decode(prompt.token_ids).partition("Hi<|end|>")[2].partition("<|start|>user")[0] == (
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"{call}<|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|>"
        f"{call}<|start|>functions.f to=assistant<|channel|>commentary<|message|>2<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
    )
    ids = [item.id for item in resolved.facts.input]
    assert ids[1:5] == ["rs_1p0001", "msg_1p0001", "fc_1p0001", "fc_1p00010001"]


async def test_input_may_answer_a_chat_call_by_its_id_only(store: Store) -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "x"}
    resolved = await normalize(store, previous_input_messages=[chat_calls("a")], input=[output])
    assert [item.id for item in resolved.facts.input] == ["fc_1p0000", "fco_1i0000"]
    with pytest.raises(InvalidRequest, match="'a'"):
        await normalize(store, previous_input_messages=[chat_calls("b")], input=[output])


async def test_input_may_answer_a_raw_call(store: Store) -> None:
    output = {"type": "function_call_output", "call_id": "call_1p0000", "output": "x"}
    resolved = await normalize(store, previous_input_messages=[CALL], input=[output])
    assert [item.id for item in resolved.facts.input] == ["fc_1p0000", "fco_1i0000"]


@pytest.mark.parametrize(("open_calls", "outputs"), [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_single_open_raw_call_matches_any_id(store: Store, open_calls: int, outputs: int) -> None:
    """Raw calls have no ids, so any id stands for the only open call."""
    messages = [CALL, RESULT, *[CALL] * open_calls]
    answers = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "x"} for number in range(outputs)
    ]
    if (open_calls, outputs) != (1, 1):
        with pytest.raises(InvalidRequest, match="call_0"):
            await normalize(store, previous_input_messages=messages, input=answers)
        return
    first, _, second, output = (await normalize(store, previous_input_messages=messages, input=answers)).facts.input
    assert second == wire.FunctionCall("fc_1p0002", "call_0", "f", "{}", "completed")
    assert isinstance(first, wire.FunctionCall)
    assert isinstance(output, wire.FunctionCallOutput)
    assert (first.call_id, output.call_id) == ("call_1p0000", "call_0")


def raw_prompt(conversation: Any) -> list[Json]:
    layout = harmony_conversation(conversation)
    return [message.raw() for message in (*layout.head, *layout.messages)]


@pytest.mark.parametrize("client", ["agents", "langchain", "pydantic-ai", "codex"])
async def test_raw_prompt_round_trips(store: Store, client: str) -> None:
    body = CLIENTS[client]
    before = raw_prompt(await normalize(store, **body, left_out=ALL_LEFT_OUT))
    parameters = {key: value for key, value in body.items() if key != "input"}
    again = await normalize(store, **parameters, previous_input_messages=before, left_out=ALL_LEFT_OUT)
    assert raw_prompt(again) == before
