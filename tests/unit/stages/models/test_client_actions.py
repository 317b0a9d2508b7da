from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.frames import FunctionCallOpened
from penstock.pipeline.protocol.events import OutputItemAdded, OutputItemDone
from penstock.pipeline.protocol.items import ApplyPatchCall, LocalShellCall, ShellCall
from penstock.pipeline.protocol.tools import ClientForm
from tests.support.event_streams import checked, final
from tests.support.frames import FORMS, event_types, finished, form_call, item, sse_json, started, written_events

DEEP = "[" * 100_000


def called(form: ClientForm, *texts: str, complete: bool = True) -> Any:
    events = checked(written_events((started(), *form_call(form, *texts, complete=complete), finished("length"))))
    return final(events).output[0]


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"command": ["ls"]}', {"env": {}, "command": ["ls"]}),
        (
            '{"command": [], "env": {"A": "1"}, "timeout_ms": 5, "user": "me", "working_directory": "/a"}',
            {"command": [], "env": {"A": "1"}, "timeout_ms": 5, "user": "me", "working_directory": "/a"},
        ),
        ('{"command": ["ls"], "timeout_ms": null, "why": "?"}', {"env": {}, "command": ["ls"]}),
        ('{"command": "ls"}', {"env": {}, "command": ['{"command": "ls"}']}),
        ("ls", {"env": {}, "command": ["ls"]}),
        ('{"command": ["l', {"env": {}, "command": ['{"command": ["l']}),
        (DEEP, {"env": {}, "command": [DEEP]}),
    ],
)
def test_local_shell_action_is_one_command(arguments: str, action: dict[str, Any]) -> None:
    assert called("local_shell", arguments) == LocalShellCall(
        "lsh_10000", "call_10000", {"type": "exec", **action}, "completed"
    )


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"commands": ["ls", ""]}', {"commands": ["ls", ""]}),
        ('{"commands": [], "timeout_ms": 5}', {"commands": [], "timeout_ms": 5}),
        ('{"commands": ["ls"], "max_output_length": 9}', {"commands": ["ls"], "max_output_length": 9}),
        (
            '{"commands": ["ls"], "max_output_length": "9"}',
            {"commands": ['{"commands": ["ls"], "max_output_length": "9"}']},
        ),
        ("ls\n", {"commands": ["ls\n"]}),
        (DEEP, {"commands": [DEEP]}),
    ],
)
def test_shell_action_is_a_list_of_commands(arguments: str, action: dict[str, Any]) -> None:
    assert called("shell", arguments) == ShellCall("sh_10000", "call_10000", action, "completed")


@pytest.mark.parametrize(
    ("arguments", "operation"),
    [
        (FORMS["apply_patch"], {"type": "create_file", "path": "a.txt", "diff": "+a"}),
        ('{"type": "update_file", "path": "a", "diff": ""}', {"type": "update_file", "path": "a", "diff": ""}),
        ('{"type": "delete_file", "path": "a", "diff": "-a"}', {"type": "delete_file", "path": "a"}),
        (
            '{"type": "move_file", "path": "a"}',
            {"type": "update_file", "path": "", "diff": '{"type": "move_file", "path": "a"}'},
        ),
        ("*** Begin Patch", {"type": "update_file", "path": "", "diff": "*** Begin Patch"}),
        (DEEP, {"type": "update_file", "path": "", "diff": DEEP}),
    ],
)
def test_patch_operation_changes_one_file(arguments: str, operation: dict[str, Any]) -> None:
    assert called("apply_patch", arguments) == ApplyPatchCall("apc_10000", "call_10000", operation, "completed")


@pytest.mark.parametrize("form", FORMS)
def test_truncated_client_call_is_incomplete(form: ClientForm) -> None:
    assert called(form, '{"comm', complete=False).status == "incomplete"


@pytest.mark.parametrize("form", FORMS)
def test_client_call_is_sent_when_it_is_complete(form: ClientForm) -> None:
    text = FORMS[form]
    events = checked(written_events((started(), *item(FunctionCallOpened("f", form=form), *text), finished())))
    added, done = (event.item for event in events if isinstance(event, OutputItemAdded | OutputItemDone))
    assert sse_json(events[2])["item"] == {**sse_json(events[-2])["item"], "status": "in_progress"}
    assert (getattr(added, "status", None), getattr(done, "status", None)) == ("in_progress", "completed")


def test_shell_commands_have_their_own_events() -> None:
    events = checked(written_events((started(), *form_call("shell", '{"commands": ["ls", "", "pwd"]}'), finished())))
    bodies = [sse_json(event) for event in events[3:-2]]
    names = ["added", "delta", "done", "added", "done", "added", "delta", "done"]
    assert event_types(events[3:-2]) == [f"shell_call_command.{name}" for name in names]
    assert [body["command_index"] for body in bodies] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [body.get("command", body.get("delta")) for body in bodies] == ["", "ls", "ls", "", "", "", "pwd", "pwd"]
