"""Items become chat messages: nothing is lost, and a turn of the model is one message."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.tools import CustomTool, Tool
from penstock.stages.render.item_texts import PENDING
from tests.support.chat_templates import item_tokens, lay_out_messages, messages_in_brief
from tests.support.harmony import (
    approval,
    call,
    code_call,
    conversation,
    custom_call,
    custom_output,
    decision,
    function,
    mcp_call,
    message,
    output,
    reasoning,
    shell_call,
    shell_output,
    web_call,
)
from tests.support.parallel_calls import Parallel, parallel_turns

pytestmark = pytest.mark.vllm

ASKED = message("user", "How warm is it?")
USER = {"role": "user", "content": "How warm is it?"}
TOOLS: list[Tool] = [function("get_weather"), CustomTool("sql"), function("ask", namespace="docs")]


def turns(*history: items.Item, **more: Any) -> list[dict[str, Any]]:
    """The messages after the user's."""
    first, *others = messages_in_brief(conversation(ASKED, *history, tools=TOOLS, **more))
    assert first == USER
    return others


def tool(text: str, name: str = "get_weather", call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


@pytest.mark.defect("V12")
def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def test_calls_and_reasoning_of_the_history_are_kept() -> None:
    history: list[items.Item] = [
        ASKED,
        reasoning("I look it up."),
        call("get_weather", '{"city": "Oslo"}'),
        output("18 °C"),
        reasoning("And the numbers."),
        custom_call("sql", "SELECT 1", "call_2"),
        custom_output("1", "call_2"),
        message("assistant", "It is warm."),
    ]
    assert messages_in_brief(conversation(message("user", "Thanks."), history=history, tools=TOOLS)) == [
        USER,
        {"role": "assistant", "reasoning": "I look it up.", "tool_calls": [("get_weather", {"city": "Oslo"})]},
        tool("18 °C"),
        {"role": "assistant", "reasoning": "And the numbers.", "tool_calls": [("sql", {"input": "SELECT 1"})]},
        tool("1", "sql", "call_2"),
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "Thanks."},
    ]


def test_reasoning_has_both_names() -> None:
    shown = lay_out_messages(conversation(ASKED, reasoning("Hm."), message("assistant", "Yes."))).messages[1]
    assert shown["reasoning"] == shown["reasoning_content"] == "Hm."


@pytest.mark.defect("V13")
def test_all_parts_of_a_message_are_read() -> None:
    answer = items.Message(
        "msg", "completed", "assistant", (items.OutputText("I "), items.OutputText("will not: "), items.Refusal("No."))
    )
    assert turns(answer) == [{"role": "assistant", "content": parts("I ", "will not: ", "No.")}]


@pytest.mark.defect("V13")
def test_message_without_parts_is_empty() -> None:
    assert turns(items.Message("msg", "completed", "assistant", ())) == [{"role": "assistant", "content": ""}]


@pytest.mark.defect("V15")
def test_parts_of_an_output_stay_apart() -> None:
    history = (call("get_weather", "{}"), output((items.InputText("18 "), items.InputText("°C"))))
    assert turns(*history)[1] == {**tool(""), "content": parts("18 ", "°C")}


@pytest.mark.defect("V12")
def test_parts_of_an_answer_are_one_message() -> None:
    assert turns(reasoning("Hm."), message("assistant", "One. ", "Two.")) == [
        {"role": "assistant", "reasoning": "Hm.", "content": parts("One. ", "Two.")}
    ]


@pytest.mark.defect("21")
def test_text_and_calls_of_one_turn_are_one_message() -> None:
    history = (
        reasoning("Both."),
        message("assistant", "I look."),
        call("get_weather", '{"city": "Oslo"}', "a"),
        call("get_weather", '{"city": "Rome"}', "b"),
        output("2", "b"),
        output("1", "a"),
    )
    assert turns(*history) == [
        {
            "role": "assistant",
            "reasoning": "Both.",
            "content": "I look.",
            "tool_calls": [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})],
        },
        tool("1", call_id="a"),
        tool("2", call_id="b"),
    ]


@pytest.mark.defect("21")
def test_call_after_an_output_is_of_another_turn() -> None:
    history = (call("get_weather", "{}", "a"), output("1", "a"), call("get_weather", "{}", "b"), output("2", "b"))
    roles = [shown["role"] for shown in turns(*history)]
    assert roles == ["assistant", "tool", "assistant", "tool"]


@pytest.mark.defect("21")
def test_tokens_separate_turns() -> None:
    first, second = mcp_call("ask"), mcp_call("ask")
    one_turn = dict([item_tokens(first, "a"), item_tokens(second, "b<|im_end|>")])
    two_turns = dict([item_tokens(first, "a<|im_end|>"), item_tokens(second, "b<|im_end|>")])
    request = conversation(ASKED, first, second, tools=TOOLS)
    assert [shown["role"] for shown in messages_in_brief(msgspec.structs.replace(request, tokens=one_turn))[1:]] == [
        *("assistant", "tool", "tool")
    ]
    assert [shown["role"] for shown in messages_in_brief(msgspec.structs.replace(request, tokens=two_turns))[1:]] == [
        *("assistant", "tool", "assistant", "tool")
    ]


def test_shell_output_does_not_split_a_turn() -> None:
    first, second = shell_call("ls", call_id="a"), call("get_weather", "{}", "b")
    request = conversation(
        ASKED, first, shell_output({"stdout": "x", "stderr": ""}, call_id="a"), second, output("1", "b"), tools=TOOLS
    )
    request = msgspec.structs.replace(
        request, tokens=dict([item_tokens(first, "a"), item_tokens(second, "b<|im_end|>")])
    )
    assert messages_in_brief(request)[1:] == [
        {"role": "assistant", "tool_calls": [("container__exec", {"cmd": ["bash", "-lc", "ls"]}), ("get_weather", {})]},
        tool("x", "container__exec", "a"),
        tool("1", call_id="b"),
    ]


@pytest.mark.parametrize(
    ("item", "name", "arguments", "result"),
    [
        (mcp_call("ask", '{"q": 1}', "yes"), "docs__ask", {"q": 1}, "yes"),
        (mcp_call("ask", "{}", None, status="failed", error={"message": "No."}), "docs__ask", {}, "No."),
        (code_call("1+1", "2\n"), "python", {"code": "1+1"}, "2"),
        (
            web_call(type="search", query="x", sources=[{"url": "https://e.org"}]),
            "browser__search",
            {"query": "x"},
            "https://e.org",
        ),
    ],
)
def test_server_side_call_has_its_result(item: Any, name: str, arguments: Any, result: str) -> None:
    assert turns(item, message("assistant", "So.")) == [
        {"role": "assistant", "tool_calls": [(name, arguments)]},
        tool(result, name, item.id),
        {"role": "assistant", "content": "So."},
    ]


def test_stored_result_takes_precedence() -> None:
    item = web_call(type="search", query="x")
    request = msgspec.structs.replace(conversation(ASKED, item), results={item.id: "a page"})
    assert messages_in_brief(request)[-1] == tool("a page", "browser__search", item.id)


CLIENT_CALLS: list[tuple[items.Item, items.Item, str, Any, str]] = [
    (
        items.LocalShellCall("lsh", "c", {"type": "exec", "command": ["ls"]}, "completed"),
        items.LocalShellCallOutput("c", "x"),
        "local_shell",
        {"command": ["ls"]},
        "x",
    ),
    (
        shell_call("ls", call_id="c", here=False),
        shell_output({"stdout": "x"}, call_id="c"),
        "shell",
        {"commands": ["ls"]},
        '[{"stdout":"x"}]',
    ),
    (
        items.ApplyPatchCall("apc", "c", {"type": "delete_file", "path": "a"}, "completed"),
        items.ApplyPatchCallOutput("apo", "c", "completed", "Done."),
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        "Done.",
    ),
]


@pytest.mark.parametrize(("item", "answer", "name", "arguments", "result"), CLIENT_CALLS)
def test_client_side_calls_are_functions(
    item: items.Item, answer: items.Item, name: str, arguments: Any, result: str
) -> None:
    assert turns(item, answer) == [{"role": "assistant", "tool_calls": [(name, arguments)]}, tool(result, name, "c")]


def test_refused_call_is_shown_with_the_reason() -> None:
    request, granted = approval("delete"), approval("read")
    assert turns(
        request, decision(request, approve=False, reason="too risky"), granted, decision(granted, approve=True)
    ) == [
        {"role": "assistant", "tool_calls": [("docs__delete", {})]},
        tool("The user did not approve of this call: too risky", "docs__delete", request.id),
    ]


def test_truncated_calls_are_omitted_unless_answered() -> None:
    """The model must not repeat half a call."""
    assert turns(message("assistant", "I"), call("get_weather", '{"ci', status="incomplete")) == [
        {"role": "assistant", "content": "I"}
    ]
    assert turns(mcp_call("ask", '{"', None, status="incomplete")) == []
    assert len(turns(call("get_weather", "{}", status="incomplete"), output("1"))) == 2


def test_broken_arguments_are_kept_as_text() -> None:
    shown = lay_out_messages(conversation(ASKED, call("get_weather", '{"city": "Os'), output("no"))).messages[1]
    arguments = shown["tool_calls"][0]["function"]["arguments"]
    assert dict(arguments) == {"arguments": '{"city": "Os'}
    assert "<" + arguments + ">" == '<{"city": "Os>'


def test_output_without_its_call_gets_one() -> None:
    """Templates need a call for each result."""
    assert turns(output("18", "gone")) == [
        {"role": "assistant", "tool_calls": [("unknown", {})]},
        tool("18", "unknown", "gone"),
    ]


def test_outputs_of_an_asynchronous_call_come_at_their_own_places() -> None:
    called = msgspec.structs.replace(call("get_weather", '{"city": "Oslo"}'), is_async=True)
    history: list[items.Item] = [
        called,
        message("assistant", "I ask."),
        output("18 °C"),
        message("user", "And now?"),
        output("19 °C"),
    ]
    again = {"role": "assistant", "tool_calls": [("get_weather", {"city": "Oslo"})]}
    assert turns(*history) == [
        again,
        tool(PENDING),
        {"role": "assistant", "content": "I ask."},
        again,
        tool("18 °C"),
        {"role": "user", "content": "And now?"},
        again,
        tool("19 °C"),
    ]


def test_leading_instructions_are_one_system_message() -> None:
    tools = items.AdditionalTools("at", "developer", ())
    history = (message("developer", "Two."), tools, message("system", "Three."), ASKED, message("developer", "Four."))
    assert messages_in_brief(conversation(*history, instructions="One.")) == [
        {"role": "system", "content": "One.\n\nTwo.\n\nThree."},
        USER,
        {"role": "system", "content": "Four."},
    ]


def test_images_keep_their_places() -> None:
    shown = items.Message(
        "m",
        "completed",
        "user",
        (items.InputText("a"), items.InputImage("u1"), items.InputText("b"), items.InputText("c")),
    )
    returned = output((items.InputText("d"), items.InputImage("u2")))
    request = conversation(shown, call("get_weather", "{}"), returned)
    layout = lay_out_messages(request, images={"u1": "data:1", "u2": "data:2"})
    assert layout.images == ("data:1", "data:2")
    assert layout.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:1"}},
        *parts("b", "c"),
    ]
    assert layout.messages[2]["content"][1] == {"type": "image_url", "image_url": {"url": "data:2"}}


texts = st.text("abc", min_size=1, max_size=3)
made = st.one_of(
    st.builds(lambda text: message("user", text), texts),
    st.builds(lambda text: message("assistant", text), texts),
    st.builds(reasoning, texts),
    st.builds(lambda number, text: call("get_weather", f'{{"a": "{text}"}}', f"c{number}"), st.integers(0, 2), texts),
    st.builds(lambda number, text: output(text, f"c{number}"), st.integers(0, 2), texts),
    st.builds(lambda text: mcp_call("ask", "{}", text), texts),
)


@given(st.lists(made, max_size=12))
def test_results_follow_the_message_of_their_calls(history: list[items.Item]) -> None:
    messages = lay_out_messages(conversation(*history)).messages
    awaited: list[str] = []
    for shown in messages:
        if shown["role"] == "tool":
            assert shown["tool_call_id"] in awaited
            awaited = awaited[awaited.index(shown["tool_call_id"]) + 1 :]
        else:
            awaited = [made["id"] for made in shown.get("tool_calls", ())]
    whole = "\n".join(f"{shown.get('content')} {shown.get('reasoning')}" for shown in messages)
    assert all(item.text in whole for item in history if isinstance(item, items.Message | items.Reasoning))


@given(parallel_turns())
def test_outputs_of_parallel_calls_are_read_in_the_order_of_the_calls(turns: list[Parallel]) -> None:
    sent = lay_out_messages(conversation(history=[item for turn in turns for item in turn.as_sent]))
    assert sent == lay_out_messages(conversation(history=[item for turn in turns for item in turn.in_order]))
    called: list[str] = []
    for shown, group in groupby(sent.messages, lambda shown: shown["role"]):
        if shown == "assistant":
            called = [made["id"] for made in [*group][-1].get("tool_calls", ())]
        elif shown == "tool":
            assert [result["tool_call_id"] for result in group] == called


CONTINUED: Mapping[str, tuple[items.Item, ...]] = {
    "reasoning": tuple(replace(reasoning(text), status="incomplete") for text in ("Let ", "me ", "th")),
    "content": tuple(replace(message("assistant", text), status="incomplete") for text in ("It ", "is ", "s")),
}


@pytest.mark.parametrize(("name", "cut"), CONTINUED.items(), ids=CONTINUED)
def test_continued_text_is_one(name: str, cut: tuple[items.Item, ...]) -> None:
    text = "".join(item.text for item in cut if isinstance(item, items.Message | items.Reasoning))
    whole = [ASKED, *cut[:-1], replace(cut[-1], status="completed")]
    assert lay_out_messages(conversation(*whole)).messages[1][name] == text
    assert lay_out_messages(conversation(ASKED, *cut)).messages[1][name] == text


def test_truncated_answer_is_left_open() -> None:
    begun = msgspec.structs.replace(message("assistant", "It is"), status="incomplete")
    assert lay_out_messages(conversation(ASKED, begun)).continues
    assert not lay_out_messages(conversation(ASKED, begun, ASKED)).continues
    assert not lay_out_messages(conversation(ASKED, message("assistant", "It is"))).continues
    assert isinstance(conversation(ASKED), ResolvedRequest)


def test_screenshot_is_the_result_of_a_computer_call() -> None:
    action = {"type": "wait"}
    url = "data:image/png;base64,aGk="
    call = items.ComputerCall("cu_1", "call_1", "completed", actions=(action,))
    screen = items.ComputerCallOutput("cuo_1", "call_1", items.Screenshot(url), "completed")
    laid_out = lay_out_messages(conversation(ASKED, call, screen), images={url: url})
    _, called, shown = laid_out.messages
    assert called["tool_calls"][0]["function"]["name"] == "computer"
    assert called["tool_calls"][0]["function"]["arguments"] == {"actions": [action]}
    assert (shown["role"], shown["tool_call_id"]) == ("tool", "call_1")
    assert shown["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    assert laid_out.images == (url,)
