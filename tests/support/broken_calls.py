"""Every rule that calls hold to, with the ways to break it alone in a stream that is good otherwise."""

from __future__ import annotations

from msgspec import UNSET

from pipeline.protocol.events import (
    CustomToolCallInputDelta,
    FunctionCallArgumentsDelta,
    McpCallInProgress,
    ShellCallCommandAdded,
)
from pipeline.protocol.items import ListedTool
from tests.support.frames import WRITTEN, asking_turn, rare_turn, served_turns
from tests.support.stream_changes import Change, both, copy, drop, instead, of, put, put_done_item, put_item, repeat

RARE, SERVED, ASKED = rare_turn(), served_turns(), asking_turn()

# In the events of `whole_turn`, the message begins at 9, the call at 16, and 21 is the end.
# In those of RARE, the custom call begins at 16.
# In those of SERVED, lists begin at 2 and 6, MCP calls at 16 and 23, code at 29 and 37, searches at 43 and 48, the
# shell's call at 52 and its output at 57; the second of two failed.
# In those of ASKED, the request for approval begins at 2, forms at 4, 6 and 16.


def served(*changes: Change) -> list[Change]:
    return [of(SERVED, change) for change in changes]


def asked(*changes: Change) -> list[Change]:
    return [of(ASKED, change) for change in changes]


BROKEN_CALLS: dict[str, list[Change]] = {
    # What is added, and what is done
    "an item is added in progress": [put_item(9, status="completed"), *served(put_item(16, status="completed"))],
    "a call is added empty": [
        put_item(16, arguments="{}"),
        of(RARE, put_item(16, input="l")),
        *served(
            put_item(2, tools=(ListedTool("a", {}),)),
            put_item(2, error="No."),
            put_item(16, arguments="{"),
            put_item(16, output=""),
            put_item(29, code="1"),
            put_item(29, outputs=()),
            put_item(57, output=(WRITTEN,)),
        ),
    ],
    "a done item has ended": [
        put_item(15, status="in_progress"),
        put_item(8, status=UNSET),
        put_item(20, status="failed"),
        *served(put_item(22, status="in_progress"), put_item(56, status="failed"), put_item(62, status="failed")),
        *asked(put_item(15, status="in_progress"), put_item(17, status="failed")),
    ],
    "a done call holds what its events built": [
        put_item(20, arguments="{}"),
        of(RARE, put_item(19, input="")),
        *served(
            put_item(22, arguments="{}"),
            put_item(36, code="1"),
            put_item(62, output=()),
            both(drop(60), drop(60)),
        ),
    ],
    "an output is that of a call ahead of it": served(put_item(57, call_id="call_10003")),
    # Steps
    "events of calls are of their call's kind": [
        instead(11, FunctionCallArgumentsDelta(11, "msg_10001", 1, "{}")),
        instead(17, CustomToolCallInputDelta(17, "fc_10002", 2, "{}")),
        instead(17, McpCallInProgress(17, "fc_10002", 2)),
        instead(17, ShellCallCommandAdded(17, 2, 0, "")),
        of(RARE, instead(17, FunctionCallArgumentsDelta(17, "ctc_10002", 2, "ls"))),
        *served(
            instead(30, McpCallInProgress(30, "ci_10005", 5)),
            instead(18, FunctionCallArgumentsDelta(18, "mcp_10003", 3, "{}")),
            instead(53, McpCallInProgress(53, "sh_10009", 9)),
            instead(58, McpCallInProgress(58, "sho_1000a", 10)),
        ),
        *asked(instead(3, McpCallInProgress(3, "mcpr_10000", 0))),
    ],
    "a call is in progress first": served(drop(17), drop(24), drop(30), drop(38)),
    "a call takes one step after another, and each once": served(
        drop(3),
        drop(33),
        drop(34),
        drop(44),
        drop(45),
        repeat(17),
        repeat(21),
        repeat(35),
        repeat(45),
        copy(34, behind=29),
        copy(35, behind=33),
    ),
    "a call takes all steps to its status": [
        drop(19),
        of(RARE, drop(18)),
        *served(
            drop(4),
            drop(8),
            drop(21),
            drop(27),
            drop(35),
            drop(41),
            drop(46),
            drop(50),
            drop(49, 50),
            put_item(42, status="completed"),
            put_item(51, status="completed"),
        ),
    ],
    "a call ends as its events say": served(
        put_item(9, error=None),
        put_item(22, status="failed"),
        put_item(28, status="completed"),
        put_item(36, status="failed"),
        put_item(47, status="failed"),
    ),
    "an error is that of a call that failed": served(put_item(28, error=None), put_item(22, error={"type": "x"})),
    "an output is that of a call that completed": served(put_item(28, output="Fine.")),
    # Shells
    "a shell call tells its commands": [
        *served(drop(53, 54, 55), drop(55)),
        *asked(drop(12, 13, 14), drop(*range(7, 15))),
    ],
    "a command is added, told and done before the next": [
        *served(drop(53), repeat(53), repeat(55)),
        *asked(drop(9), drop(10), drop(11)),
    ],
    "a command is added empty": served(put(53, command="ls")),
    "command indexes count the commands of a call": [
        *served(put(53, command_index=1), put(54, command_index=1), put(55, command_index=1)),
        *asked(drop(10, 11)),
    ],
    "outputs come in the order of their commands": served(
        put(58, command_index=1), put(59, command_index=1), drop(58, 59)
    ),
    "the deltas of an output sum to what its done event carries": served(
        drop(58),
        repeat(58),
        put(58, delta={"stdout": "b"}),
        put(60, delta={"stdout": "b\n"}),
    ),
    "an output that was begun is done": served(both(put_done_item(62, output=(WRITTEN,)), drop(61))),
}
"""The changes are made to the stream of `whole_turn`, or of the frames they name."""
