from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.responses import (
    ResponseComputerToolCall,
    response_apply_patch_tool_call,
    response_function_shell_tool_call,
    response_output_item,
)
from pydantic import TypeAdapter

from penstock.pipeline.frames import FunctionCallOpened
from penstock.pipeline.protocol.events import OutputItemAdded, OutputItemDone
from penstock.pipeline.protocol.items import (
    ApplyPatchCall,
    ComputerCall,
    ItemStatus,
    LocalShellCall,
    Reasoning,
    ReasoningText,
    ShellCall,
    ToolSearchCall,
)
from penstock.pipeline.protocol.tools import ClientForm
from penstock.stages.models.shell_calls import shown
from tests.support.event_streams import checked, final
from tests.support.frames import FORMS, event_types, finished, form_call, item, sse_json, started, written_events

DEEP = "[" * 100_000


def called(form: ClientForm, *texts: str, complete: bool = True) -> Any:
    events = checked(written_events((started(), *form_call(form, *texts, complete=complete), finished("length"))))
    return final(events).output[0]


def lists(*commands: str | list[str]) -> dict[str, Any]:
    return {"commands": [*commands]}


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"commands": ["ls", "pwd"]}', lists("ls", "pwd")),
        ('{"commands": ["ls"], "max_output_length": 9, "why": "?"}', lists("ls") | {"max_output_length": 9}),
        ('{"commands": ["ls"], "timeout_ms": 1.5}', lists("ls") | {"timeout_ms": 1}),
        ('{"commands": "ls -l"}', lists("ls -l")),
        ('{"commands": [["bash", "-lc", "ls | wc"], ["grep", "a b", "."]]}', lists("ls | wc", "grep 'a b' .")),
        ('{"command":["bash","-lc","ls"]}', lists("ls")),
        ('{"cmd": ["ls", "-l"], "timeout": 20}', lists("ls -l") | {"timeout_ms": 20}),
        ('{"cmd": "ls"}', lists("ls")),
        (json.dumps({"commands": json.dumps(["ls", "pwd"])}), lists("ls", "pwd")),
        ('{"commands": ["[ -f a ] && echo {a,b}"]}', lists("[ -f a ] && echo {a,b}")),
    ],
)
def test_shell_action_is_a_list_of_commands(arguments: str, action: dict[str, Any]) -> None:
    assert called("shell", arguments) == ShellCall("sh_10000", "call_10000", action, "completed")


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"command": ["ls"]}', {"command": ["ls"]}),
        ('{"command": ["ls"], "timeout_ms": null, "why": "?"}', {"command": ["ls"]}),
        ('{"command": "ls -l"}', {"command": ["bash", "-c", "ls -l"]}),
        ('{"commands": ["ls -l"]}', {"command": ["bash", "-c", "ls -l"]}),
        (
            '{"cmd": ["ls"], "env": {"A": "1"}, "timeout": 5, "user": "me", "workdir": "/a"}',
            {"command": ["ls"], "env": {"A": "1"}, "timeout_ms": 5, "user": "me", "working_directory": "/a"},
        ),
    ],
)
def test_local_shell_action_is_one_command(arguments: str, action: dict[str, Any]) -> None:
    whole = {"type": "exec", "env": {}, **action}
    assert called("local_shell", arguments) == LocalShellCall("lsh_10000", "call_10000", whole, "completed")


@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        (FORMS["apply_patch"], {"type": "create_file", "path": "a.txt", "diff": "+a"}),
        ('{"type": "update_file", "path": "a", "diff": ""}', {"type": "update_file", "path": "a", "diff": ""}),
        ('{"type": "delete_file", "path": "a", "diff": "-a"}', {"type": "delete_file", "path": "a"}),
    ],
)
def test_patch_operation_changes_one_file(arguments: str, operation: dict[str, Any]) -> None:
    assert called("apply_patch", arguments) == ApplyPatchCall("apc_10000", "call_10000", operation, "completed")


WAIT = {"type": "wait"}


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [
        (FORMS["computer"], [{"type": "click", "x": 1, "y": 2, "button": "left"}, WAIT]),
        ('{"action": {"type": "wait", "why": "?"}}', [WAIT]),
        (
            '{"actions": [{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}], "keys": ["CTRL"]}]}',
            [{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}], "keys": ["CTRL"]}],
        ),
    ],
)
def test_computer_actions_are_a_list(arguments: str, actions: list[dict[str, Any]]) -> None:
    assert called("computer", arguments) == ComputerCall("cu_10000", "call_10000", "completed", actions=(*actions,))


def test_preview_of_a_computer_has_one_action() -> None:
    for arguments in ('{"action": {"type": "wait"}}', '{"actions": [{"type": "wait"}]}'):
        call = called("computer_use_preview", arguments)
        assert call == ComputerCall("cu_10000", "call_10000", "completed", action=WAIT)


NO_ACTIONS: dict[ClientForm, list[str]] = {
    "shell": [
        *("", "ls", '"ls"', "[]", '["ls"]', "{}", DEEP, '{"commands":["rm -rf build', '{"commands": []}'),
        *('{"commands": [""]}', '{"commands": ["ls"], "max_output_length": "9"}', '{"commands": ["ls"], "cmd": "ls"}'),
        *('{"cmd": "ls", "workdir": "/a"}', '{"cmd": "ls", "env": {"A": "1"}}', '{"cmd": "ls", "user": "me"}'),
        json.dumps({"commands": ['{"command":["bash","-lc","ls"]}']}),
        json.dumps({"command": '{"cmd": "ls"}'}),
    ],
    "local_shell": ["ls", '{"command": []}', '{"command": ["l', '{"commands": ["ls", "pwd"]}', DEEP],
    "apply_patch": [
        *("*** Begin Patch", '{"type": "move_file", "path": "a"}', '{"path": "a", "diff": ""}', DEEP),
        *('{"type": "update_file", "path": "a"}', '{"type": "delete_file", "path": " "}'),
        json.dumps({"input": "*** Begin Patch"}),
    ],
    "tool_search": ["weather", '"weather"', "[]", '{"query": "wea', DEEP],
    "computer": [
        *("click", "{}", '{"actions": []}', '{"actions": [{"type": "jump"}]}', '{"actions": [{"type": "click"}]}'),
        *('{"actions": [{"type": "move", "x": "1", "y": 2}]}', '{"actions": [{"type": "wait"}', DEEP),
        json.dumps({"actions": [{"type": "wait"}] * 65}),
    ],
    "computer_use_preview": ['{"action": "click"}', '{"actions": [{"type": "wait"}, {"type": "wait"}]}'],
}


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("form", "arguments"), [(form, text) for form, texts in NO_ACTIONS.items() for text in texts if text]
)
def test_call_without_an_action_is_a_thought(form: ClientForm, arguments: str, complete: bool) -> None:
    """Clients execute a call even if it is incomplete, so there is none."""
    status: ItemStatus = "completed" if complete else "incomplete"
    halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
    assert called(form, *filter(None, halves), complete=complete) == Reasoning(
        "rs_10000", content=(ReasoningText(arguments),), status=status
    )


@pytest.mark.parametrize("form", FORMS)
def test_call_that_was_cut_behind_its_arguments_is_incomplete(form: ClientForm) -> None:
    assert called(form, FORMS[form], complete=False).status == "incomplete"


_WORDS = st.sampled_from(["ls", "", " ", "a b", '{"command": ["ls"]}', '["ls"]', "[ -f a ]", "{}", "a\0b", "é"])
_COMMANDS = st.recursive(_WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
_ACTIONS = st.sampled_from([WAIT, {"type": "click", "x": 1, "y": 2, "button": "left"}, {"type": "jump"}])
_VALUES = (
    _ACTIONS
    | st.lists(_ACTIONS, max_size=3)
    | _COMMANDS
    | _COMMANDS.map(json.dumps)
    | st.none()
    | st.integers(-1, 9)
    | st.booleans()
    | st.floats(0, 9)
)
_KEYS = st.sampled_from(
    [
        *("cmd", "command", "commands", "timeout", "timeout_ms", "max_output_length", "workdir", "env", "user"),
        *("type", "path", "diff", "input", "working_directory", "action", "actions"),
    ]
)
_TEXTS = (
    st.dictionaries(_KEYS, _VALUES | st.sampled_from(["create_file", "update_file", "delete_file"]), max_size=4)
    .map(json.dumps)
    .flatmap(lambda text: st.integers(1, len(text)).map(lambda end: text[:end]) | st.just(text))
)
_SDK = {
    "shell": TypeAdapter(response_function_shell_tool_call.Action),
    "local_shell": TypeAdapter(response_output_item.LocalShellCallAction),
    "apply_patch": TypeAdapter(response_apply_patch_tool_call.Operation),
}


def written_commands(value: Any) -> Iterator[str]:
    """All texts and words in the arguments, and those in texts that are lists in JSON."""
    match value:
        case str():
            yield value
            with suppress(ValueError):
                if isinstance(inner := json.loads(value), list):
                    yield from written_commands(inner)
        case list():
            if all(isinstance(word, str) for word in value) and value:
                yield shown(tuple(value))
            for inner in value:
                yield from written_commands(inner)
        case _:
            pass


@given(st.sampled_from(list(FORMS)), _TEXTS | st.text(min_size=1, max_size=20), st.booleans())
@example("shell", '{"command":["bash","-lc","ls"]}', True)
@example("shell", '{"commands":["rm -rf build', False)
@example("apply_patch", '{"input": "*** Begin Patch"}', True)
def test_any_arguments_are_an_action_or_no_call(form: ClientForm, text: str, complete: bool) -> None:
    item = called(form, *filter(None, [text]), complete=complete)
    if isinstance(item, Reasoning):
        return
    assert item.status == ("completed" if complete else "incomplete")
    arguments = json.loads(text)
    match item:
        case ShellCall(action=action):
            _SDK[form].validate_python(action, strict=True)
            written = [one for key in ("cmd", "command", "commands") for one in written_commands(arguments.get(key))]
            assert action["commands"]
            assert set(action["commands"]) <= set(written)
            assert all(command.strip() for command in action["commands"])
        case LocalShellCall(action=action):
            _SDK[form].validate_python(action, strict=True)
            values = (arguments.get(key) for key in ("cmd", "command", "commands"))
            written = [one for value in values for one in written_commands(value)]
            assert set(action["command"]) - {"bash", "-c"} <= set(written)
        case ApplyPatchCall(operation=operation):
            _SDK[form].validate_python(operation)
            assert operation.items() <= arguments.items()
            assert operation["path"].strip()
        case ToolSearchCall(arguments=found):
            assert found == arguments
        case ComputerCall():
            ResponseComputerToolCall.model_validate_json(msgspec.json.encode(item), strict=True)
        case _:
            raise AssertionError(item)


@pytest.mark.parametrize("form", FORMS)
def test_client_call_is_sent_when_it_is_complete(form: ClientForm) -> None:
    text = FORMS[form]
    events = checked(written_events((started(), *item(FunctionCallOpened("f", form=form), *text), finished())))
    added, done = (event.item for event in events if isinstance(event, OutputItemAdded | OutputItemDone))
    assert sse_json(events[2])["item"] == {**sse_json(events[-2])["item"], "status": "in_progress"}
    assert (getattr(added, "status", None), getattr(done, "status", None)) == ("in_progress", "completed")


def test_shell_commands_have_their_own_events() -> None:
    events = checked(written_events((started(), *form_call("shell", '{"commands": ["ls", "pwd"]}'), finished())))
    bodies = [sse_json(event) for event in events[3:-2]]
    names = ["added", "delta", "done"] * 2
    assert event_types(events[3:-2]) == [f"shell_call_command.{name}" for name in names]
    assert [body["command_index"] for body in bodies] == [0, 0, 0, 1, 1, 1]
    assert [body.get("command", body.get("delta")) for body in bodies] == ["", "ls", "ls", "", "pwd", "pwd"]
