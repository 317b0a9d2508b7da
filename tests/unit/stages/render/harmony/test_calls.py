"""Calls of every kind in the prompt, with their results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from openai_harmony import Message as PackageMessage

from penstock.pipeline import frames
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, McpTool, Toolset
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.render.harmony.messages import harmony_conversation
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support import harmony
from tests.support.examples import examples
from tests.support.parsed_output import OPENINGS, parse_harmony_frames, turn_started


def prompt_of(*history: items.Item, **results: str) -> str:
    """The prompt text for ``items``; a result is named by the item's position, as in ``_1``."""
    known = {history[int(position[1:])].id: result for position, result in results.items()}
    prompt = harmony.prompt_text(replace(harmony.conversation(*history), results=known))
    return prompt.removesuffix("<|start|>assistant")


def called(recipient: str, shown: str, channel: str = "analysis", form: str = "code") -> str:
    return f"<|start|>assistant to={recipient}<|channel|>{channel} {form}<|message|>{shown}<|call|>"


def returned(name: str, shown: str, channel: str = "analysis") -> str:
    return f"<|start|>{name} to=assistant<|channel|>{channel}<|message|>{shown}<|end|>"


FORGOTTEN = "The result of this call is no longer known."


def test_mcp_call_is_rendered_with_its_output() -> None:
    assert prompt_of(harmony.mcp_call("read/all-of.it", '{"a": 1}', "Text.", label="my.wiki-2")) == (
        called("my.wiki-2.read/all-of.it", '{"a": 1}', "commentary", "json")
        + returned("my.wiki-2.read/all-of.it", "Text.", "commentary")
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ({"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No such page."}]}, "No such page."),
        ({"type": "mcp_tool_execution_error", "content": [{"type": "image"}, {"text": "a"}, {"text": "b\n"}]}, "a\nb"),
        ({"type": "mcp_tool_execution_error", "content": "Plain."}, "Plain."),
        ({"type": "mcp_tool_execution_error", "content": {"why": "ü"}}, '{"why": "ü"}'),
        ({"type": "mcp_protocol_error", "code": -32602, "message": "Unknown tool"}, "Unknown tool"),
        ({"type": "http_error", "code": 502, "message": "Bad gateway"}, "Bad gateway"),
        ({"type": "http_error", "code": 502}, ""),
    ],
)
def test_error_of_a_failed_call_is_rendered(error: dict[str, Any], told: str) -> None:
    failed = harmony.mcp_call("read", output=None, status="failed", error=error)
    assert prompt_of(failed).endswith(returned("docs.read", told, "commentary"))


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_interrupted_server_side_call_is_omitted(status: items.CallStatus) -> None:
    cut: list[items.Item] = [
        harmony.mcp_call("read", '{"a', None, status=status),
        harmony.code_call("print(", status=status),
        harmony.web_call(status, type="search", query=""),
    ]
    assert prompt_of(*cut) == prompt_of(*cut, _1="", _2="") == ""
    assert prompt_of(*cut, _1="KeyboardInterrupt") == called("python", "print(") + returned(
        "python", "KeyboardInterrupt"
    )


def test_code_call_has_its_trained_form() -> None:
    code = harmony.code_call("print(1)\n", "1\n", "2")
    assert prompt_of(code, _0="[1]") == called("python", "print(1)\n") + returned("python", "[1]")
    assert prompt_of(code, _0="") == called("python", "print(1)\n") + returned("python", "")
    assert prompt_of(code) == called("python", "print(1)\n") + returned("python", "1\n2")
    assert prompt_of(harmony.code_call("x")) == called("python", "x") + returned("python", FORGOTTEN)


@pytest.mark.parametrize(
    ("action", "recipient", "arguments"),
    [
        ({"type": "search", "query": "größe"}, "search", '{"query": "größe"}'),
        ({"type": "search", "queries": ["a", "b"]}, "search", '{"query": "a; b"}'),
        ({"type": "open_page", "url": "https://a.example/"}, "open", '{"id": "https://a.example/"}'),
        ({"type": "open_page"}, "open", "{}"),
        ({"type": "find_in_page", "url": "https://a.example/", "pattern": "x"}, "find", '{"pattern": "x"}'),
        ({"type": "else"}, "search", '{"query": ""}'),
        ({}, "search", '{"query": ""}'),
    ],
)
def test_browser_call_is_rebuilt_from_its_action(action: dict[str, Any], recipient: str, arguments: str) -> None:
    went = harmony.web_call(**action)
    assert prompt_of(went, _0="[0] A") == called(f"browser.{recipient}", arguments) + returned(
        f"browser.{recipient}", "[0] A"
    )
    assert prompt_of(went).endswith(returned(f"browser.{recipient}", FORGOTTEN))


def test_search_without_a_result_lists_its_sources() -> None:
    sources = [{"type": "url", "url": "https://a.example/"}, {"type": "url", "url": "https://b.example/"}]
    went = harmony.web_call(type="search", query="x", sources=sources)
    assert prompt_of(went).endswith(returned("browser.search", "https://a.example/\nhttps://b.example/"))


def test_shell_commands_are_a_container_call() -> None:
    ran = harmony.shell_output(
        {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
        {"stdout": "b", "stderr": "no c", "outcome": {"type": "exit", "exit_code": 2}},
        {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
    )
    request = harmony.shell_call("ls", "cat b c", timeout_ms=500)
    arguments = r'{"cmd": ["bash", "-lc", "ls\ncat b c"], "timeout": 500}'
    told = "a\nb\nno c\nThe command ended with exit code 2.\nThe command took too long."
    assert prompt_of(request, ran) == called("container.exec", arguments) + returned("container.exec", told)
    assert prompt_of(request, ran, _1="as it was").endswith(returned("container.exec", "as it was"))


FORMS: dict[str, tuple[items.Item, items.Item, str, str]] = {
    "local_shell": (
        items.LocalShellCall("lsh_1", "call_1", {"type": "exec", "command": ["ls", "-l"], "env": {}}, "completed"),
        items.LocalShellCallOutput("call_1", "a\n"),
        '{"command":["ls","-l"],"env":{}}',
        "a\n",
    ),
    "shell": (
        harmony.shell_call("ls", here=False, timeout_ms=None),
        harmony.shell_output({"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}),
        '{"commands":["ls"]}',
        '[{"stdout":"a","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "apply_patch": (
        items.ApplyPatchCall("apc_1", "call_1", {"type": "delete_file", "path": "a.py"}, "completed"),
        items.ApplyPatchCallOutput("apco_1", "call_1", "failed", "No such file."),
        '{"type":"delete_file","path":"a.py"}',
        "No such file.",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_client_side_calls_are_functions(name: str) -> None:
    made, answer, arguments, told = FORMS[name]
    recipient = f"functions.{name}"
    assert prompt_of(made, answer) == called(recipient, arguments, "commentary", "json") + returned(
        recipient, told, "commentary"
    )
    assert prompt_of(replace(made, status="incomplete")) == ""
    assert arguments in prompt_of(replace(made, status="incomplete"), answer)


def test_refused_call_is_answered_with_the_reason() -> None:
    request = harmony.approval("write", '{"a": 1}')
    ahead = called("docs.write", '{"a": 1}', "commentary", "json")
    for reason, told in ((None, "The user did not approve of this call."), ("Too late", "this call: Too late")):
        prompt = prompt_of(request, harmony.decision(request, approve=False, reason=reason))
        assert prompt.startswith(ahead + "<|start|>docs.write to=assistant<|channel|>commentary<|message|>")
        assert prompt.endswith(f"{told}<|end|>")


def test_approved_call_is_rendered_once() -> None:
    """The approval request is omitted, as the call is a separate item."""
    request = harmony.approval("write")
    made = replace(harmony.mcp_call("write"), approval_request_id=request.id)
    assert prompt_of(request, harmony.decision(request, approve=True)) == prompt_of(request) == ""
    assert prompt_of(request, harmony.decision(request, approve=True), made) == prompt_of(made)


def test_tool_list_is_no_message() -> None:
    assert prompt_of(
        items.McpListTools("mcpl_1", "docs", (items.ListedTool("read", {}),)), harmony.message("user", "?")
    ) == prompt_of(harmony.message("user", "?"))


MIDDLE: dict[str, tuple[items.Item, ...]] = {
    "code": (harmony.code_call("print(1)", "1"),),
    "the browser": (harmony.web_call(type="search", query="x"),),
    "the shell": (harmony.shell_call("ls"), harmony.shell_output({"stdout": "a"})),
}


@pytest.mark.parametrize("middle", MIDDLE.values(), ids=MIDDLE)
def test_calls_within_reasoning_are_dropped_with_it(middle: tuple[items.Item, ...]) -> None:
    thought, answer = harmony.reasoning("Hm."), harmony.message("assistant", "So.", phase="final_answer")
    kept: list[items.Item] = [harmony.call("f", "{}"), harmony.output("1"), harmony.mcp_call("read")]
    request, again = harmony.message("user", "?"), harmony.message("user", "!")
    turn: list[items.Item] = [request, thought, *middle, *kept, answer, again]
    assert prompt_of(*turn) == prompt_of(request, *kept, answer, again)
    assert prompt_of(*turn, thought, *middle) == prompt_of(request, *kept, answer, again, thought, *middle)
    assert len(prompt_of(again, thought, *middle)) > len(prompt_of(again, thought))


def test_output_is_dropped_with_its_call() -> None:
    answer = harmony.message("assistant", "So.", phase="final_answer")
    assert prompt_of(harmony.shell_call("ls"), answer, harmony.shell_output({"stdout": "a"})) == prompt_of(answer)


def test_message_before_a_server_side_call_is_commentary() -> None:
    for then in (
        harmony.mcp_call("read"),
        harmony.code_call("x"),
        harmony.web_call(type="search", query="x"),
        harmony.shell_call("ls"),
        harmony.approval("w"),
    ):
        assert "<|channel|>commentary<|message|>I look." in prompt_of(harmony.message("assistant", "I look."), then)


# Any items

SERVER_TOOLS = Toolset(
    (
        *(FunctionTool("f"), CustomTool("g"), FunctionTool("h", namespace="team")),
        FunctionTool("shell", form="shell"),
        *(McpTool("docs", "read/all-of.it"), McpTool("my.wiki-2", "page.get")),
        *kinds()["python"].tools,
        *kinds()["browser"].tools,
        *kinds()["container"].tools,
    )
)
TEXTS = st.one_of(st.text(min_size=1, max_size=30), st.sampled_from(["<|end|>", " to=functions.f", "{}", "\ud800"]))
ASKED = harmony.approval("write")

KINDS: dict[str, Any] = {
    "user": lambda shown: harmony.message("user", shown),
    "answer": lambda shown: harmony.message("assistant", shown, phase="final_answer"),
    "remark": lambda shown: harmony.message("assistant", shown),
    "rule": lambda shown: harmony.message("developer", shown),
    "thought": harmony.reasoning,
    "call": lambda shown: harmony.call("f", shown, "a"),
    "output": lambda shown: harmony.output(shown, "a"),
    "custom": lambda shown: harmony.custom_call("g", shown, "b"),
    "custom output": lambda shown: harmony.custom_output(shown, "b"),
    "mcp": lambda shown: harmony.mcp_call("read/all-of.it", shown, shown),
    "mcp failed": lambda shown: harmony.mcp_call("read", shown, None, status="failed", error={"content": shown}),
    "mcp cut": lambda shown: harmony.mcp_call("read", shown, None, status="incomplete"),
    "code": harmony.code_call,
    "code with logs": lambda shown: harmony.code_call(shown, shown),
    "search": lambda shown: harmony.web_call(type="search", query=shown),
    "open": lambda shown: harmony.web_call(type="open_page", url=shown),
    "find": lambda shown: harmony.web_call(type="find_in_page", url=shown, pattern=shown),
    "shell here": lambda shown: harmony.shell_call(shown, call_id="c"),
    "shell": lambda shown: harmony.shell_call(shown.replace("\ud800", ""), call_id="d", here=False),
    "shell output": lambda shown: harmony.shell_output({"stdout": shown.replace("\ud800", "")}, call_id="c"),
    "request": lambda _: ASKED,
    "refusal": lambda shown: harmony.decision(ASKED, approve=False, reason=shown),
    "approval": lambda _: harmony.decision(ASKED, approve=True),
}

ITEMS = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), TEXTS).map(lambda drawn: KINDS[drawn[0]](drawn[1])))


@given(ITEMS, st.booleans(), st.integers(0, 2000))
@examples(200)
def test_any_items_can_be_rendered(history: list[items.Item], cuts: bool, context: int) -> None:
    known = {item.id: "known" for item in history[::2]}
    request = harmony.conversation(*history, tools=SERVER_TOOLS, truncation="auto" if cuts else "disabled")
    prompt = RenderHarmony(load_encoding(), context).prompt(
        frames.with_facts(replace(request, results=known), wants_raw_messages=True)
    )
    assert prompt.raw_messages is not None
    for raw in prompt.raw_messages:
        assert "\ud800" in str(raw) or PackageMessage.from_dict(raw).to_dict() == raw
    calls = sum(raw.get("recipient") not in (None, "assistant") for raw in prompt.raw_messages)
    assert load_encoding().decode(prompt.token_ids).count("<|call|>") >= calls


OPENED: dict[str, frames.ItemOpened] = {
    "call": frames.FunctionCallOpened("f"),
    "custom": frames.CustomToolCallOpened("g"),
    "mcp": frames.McpCallOpened("docs", "read/all-of.it"),
    "code": frames.CodeCallOpened(),
    "search": frames.WebCallOpened("search"),
    "open": frames.WebCallOpened("open"),
    "find": frames.WebCallOpened("find"),
    "shell here": frames.ShellCallOpened(),
    "shell": frames.FunctionCallOpened("shell", None, "shell"),
}


@pytest.mark.parametrize("kind", OPENED)
@given(shown=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@examples(25)
def test_rendered_call_parses_to_the_same_call(kind: str, shown: str) -> None:
    layout = harmony_conversation(harmony.conversation(KINDS[kind](shown)))
    tokens: list[int] = []
    for segment in list(layout.messages[0].segments())[1:]:
        tokens += [segment] if isinstance(segment, int) else load_encoding().encode(segment)
    tokens = tokens[len(load_encoding().encode("assistant")) :]
    prompts = parse_harmony_frames(
        load_encoding(), [turn_started(tools=SERVER_TOOLS), frames.TokenChunk(tuple(tokens))]
    )
    (opening,) = (frame for frame in prompts if isinstance(frame, OPENINGS))
    assert opening == OPENED[kind]
    told = "".join(frame.text for frame in prompts if isinstance(frame, frames.ItemDelta))
    assert told == "".join(layout.messages[0].texts)


def test_undeclared_tool_keeps_its_name() -> None:
    prompt = prompt_of(harmony.call("search", "{}", namespace="browser"), harmony.output("There is no such tool."))
    assert prompt == called("browser.search", "{}", "commentary", "json") + returned(
        "browser.search", "There is no such tool.", "commentary"
    )
    python = items.CodeInterpreterCall("ci_1", "1", "", "completed")
    assert prompt_of(python, _0="There is no such tool.").endswith(returned("python", "There is no such tool."))
