"""The rules of the invariant checker, each with streams that break only this rule."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.items import FunctionCall, ListedTool, OutputText, ReasoningText, Refusal, SummaryText
from penstock.pipeline.protocol.response import ErrorDetails, IncompleteDetails, ToolUsage, WebSearchUsage
from tests.support import frames
from tests.support.stream_changes import (
    Change,
    begin,
    both,
    copy,
    drop,
    end,
    instead,
    of,
    put,
    put_done_item,
    put_in,
    put_item,
    put_part,
    put_tokens,
    queued,
    repeat,
    usage,
)

CUT_TURN: frames.Frames = (
    frames.started(),
    *frames.reasoning("So."),
    *frames.message("Hel", complete=False),
    frames.finished("length"),
)
TWO_CALLS: frames.Frames = (
    frames.started(),
    *frames.function_call("{}"),
    *frames.custom_tool_call("{}"),
    frames.finished(),
)
RARE, SUMMARY = frames.rare_turn(), frames.summary_turn()
SERVED, ASKED = frames.server_turns(), frames.client_turn()

# Positions of events in the streams below.
# In `whole_turn`, reasoning begins at 2, the message at 9, the call at 16, and 21 is the end.
# In RARE, the message begins at 2, the refusal at 10, the custom call at 16, and 20 is the end.
# In SUMMARY, reasoning begins at 2, and 8 is the end.
# In SERVED, lists begin at 2 and 6, MCP calls at 16 and 23, code at 29 and 37, searches at 43 and 48, the
# shell's call at 52 and its output at 57; the second of each pair fails.
# In ASKED, the request for approval begins at 2, forms at 4, 6 and 16.

IN_A_REFUSAL: Any = {"sequence_number": 12, "item_id": "msg_10001", "output_index": 1}
IN_A_CALL: Any = {"sequence_number": 17, "item_id": "fc_10002", "output_index": 2}
IN_A_MESSAGE: Any = {"sequence_number": 11, "item_id": "msg_10001", "output_index": 1}
A_CALL = FunctionCall("msg_10001", "call_1", "clock", "", "completed")

(Y,) = frames.spelled_delta("y", 2).logprobs
ERROR = ErrorDetails("server_error", "It died.")
DETAILS = IncompleteDetails("content_filter")

BROKEN: dict[str, list[Change]] = {
    # The response
    "sequence numbers count from 0 without gaps": [put(5, sequence_number=6), lambda sent: sent[1:]],
    "nothing follows the terminal event": [repeat(21), copy(20, behind=21)],
    "a stream ends with a terminal event": [drop(21), lambda sent: []],
    "a response is created queued or in progress": [begin(status="completed"), begin(status="cancelled")],
    "a response begins without an outcome": [
        begin(output=(A_CALL,)),
        begin(usage=usage()),
        begin(error=ERROR),
        begin(completed_at=1),
        begin(incomplete_details=DETAILS),
        begin(stop_reason="END"),
        begin(input_messages=({},)),
        begin(output_messages=({},)),
    ],
    "response.created comes first, and once": [repeat(0), drop(0), both(queued, drop(0))],
    "response.queued comes once": [both(queued, repeat(1))],
    "the response in response.queued is queued": [both(queued, put_in(1, "response", status="in_progress"))],
    "response.queued follows response.created and repeats its response": [
        both(queued, put_in(1, "response", model="other")),
    ],
    "response.in_progress follows response.created and repeats its response": [
        begin(model="other"),
        both(queued, put_in(2, "response", status="queued")),
    ],
    "a response that is created queued has response.queued": [both(queued, drop(1)), begin(status="queued")],
    "nothing begins a response that is in progress": [
        repeat(1),
        copy(1, behind=8),
        copy(0, behind=8),
        both(queued, copy(1, behind=2)),
    ],
    "a response begins before it ends": [drop(*range(21))],
    "a response is in progress before it ends by itself": [
        drop(*range(1, 21)),
        both(queued, drop(*range(2, 22))),
        of(CUT_TURN, drop(*range(1, 14))),
    ],
    "every item is done before the response ends": [drop(20)],
    "fields of a response that its request determines never change": [end(id="resp_2"), end(temperature=0.5)],
    "the final output equals the items that were done": [end(output=()), put_item(20, status="incomplete")],
    "the terminal event's type is the status": [end(status=status) for status in ("failed", "cancelled", "queued")],
    "only calls and the last item may be incomplete": [
        of(CUT_TURN, put_done_item(7, status="incomplete")),
        of(SERVED, put_done_item(5, error="It broke off.")),
    ],
    "a completed response has completed items, or calls that the model left open": [
        of(SUMMARY, put_done_item(7, status="incomplete"))
    ],
    "completed_at belongs to completed responses": [end(completed_at=None), of(CUT_TURN, end(completed_at=1))],
    "error belongs to failed responses": [end(error=ERROR), of(CUT_TURN, end(error=ERROR))],
    "stop_reason belongs to completed responses": [of(CUT_TURN, end(stop_reason="END"))],
    "incomplete_details belong to incomplete responses": [
        end(incomplete_details=DETAILS),
        of(CUT_TURN, end(incomplete_details=None)),
        of(CUT_TURN, end(status="cancelled")),
    ],
    "raw messages are those of both sides": [end(input_messages=()), end(output_messages=({},))],
    "the usage of tools is that of the output": [end(tool_usage=ToolUsage(WebSearchUsage(1)))],
    "a response that ended by itself has its usage": [end(usage=None), of(CUT_TURN, end(usage=None))],
    "the total is the sum of its parts": [end(usage=usage(total=28))],
    "cached tokens are input tokens": [end(usage=usage(cached=8))],
    "reasoning tokens are output tokens": [end(usage=usage(thought=21))],
    "each turn has a number in every list": [
        end(usage=usage(turns=0)),
        end(usage=usage(turns=2)),
        end(usage=usage(turns=None)),
    ],
    "the numbers of the turns add up": [end(usage=usage(cached_in_turn=3))],
    # One item after another
    "items come after response.in_progress": [drop(1), drop(0, 1)],
    "an item is done before the next is added": [drop(8), repeat(9)],
    "output indexes count the items": [put(9, output_index=2), drop(*range(2, 9))],
    "item ids are unique": [put_item(9, id="rs_10000")],
    "call ids are unique": [
        of(TWO_CALLS, put_item(6, call_id="call_10000")),
        of(ASKED, put_item(6, call_id="call_10001")),
    ],
    "an item is added empty": [
        put_item(9, content=(OutputText(""),)),
        of(SUMMARY, put_item(2, summary=(SummaryText("So."),))),
    ],
    "every part is done before its item": [drop(7), drop(14), of(SUMMARY, drop(6)), of(RARE, drop(14))],
    "a message has at least one part": [both(put_done_item(15, content=()), drop(*range(10, 15)))],
    "an item keeps its identity": [
        put_item(15, role="user"),
        put_item(15, phase="commentary"),
        put_item(20, call_id="call_2"),
        put_item(20, name="clock"),
        put_item(20, namespace="home"),
        put(15, item=A_CALL),
        of(RARE, put_item(19, namespace="home")),
        of(RARE, put_item(19, call_id="call_2")),
        of(RARE, put(19, item=FunctionCall("ctc_10002", "call_10002", "shell", "ls", "completed"))),
        of(SERVED, put_item(5, server_label="other")),
        of(SERVED, put_item(22, name="other")),
        of(SERVED, put_item(22, approval_request_id="mcpr_1")),
        of(SERVED, put_item(36, container_id="cntr_2")),
        of(SERVED, put_item(56, environment=None)),
        of(SERVED, put_item(62, call_id="call_2")),
        of(ASKED, put_item(3, arguments="{}")),
        of(ASKED, put_item(5, action={})),
        of(ASKED, put_item(16, action={"commands": ["ls"]})),
        of(ASKED, put_item(18, operation={})),
    ],
    "a web search is done with its action": [of(SERVED, put_item(47, action=UNSET))],
    "a done item holds what its events built": [
        put_item(15, content=()),
        put_item(8, content=(ReasoningText("So."),)),
        put_item(8, summary=(SummaryText("So."),)),
        of(RARE, put_item(9, content=(OutputText("Héy", (frames.CITATION,)),))),
        of(RARE, put_item(15, content=(OutputText("No."),))),
        of(SUMMARY, put_item(7, summary=(), content=(ReasoningText("So."),))),
    ],
    "an event of an item comes between its added and its done event": [drop(2), drop(16), repeat(8)],
    "an event carries the output index of the open item": [put(at, output_index=3) for at in (*range(3, 9), 17, 20)],
    "an event carries the id of the open item": [
        *(put(at, item_id="rs_0") for at in (*range(3, 8), 17, 19)),
        put_item(8, id="rs_0"),
    ],
    # Parts and texts
    "a part is of its item's kind": [
        put(10, part=ReasoningText("")),
        put(3, part=OutputText("")),
        put(3, part=Refusal("")),
        of(SUMMARY, put(3, part=OutputText(""))),
        instead(17, events.ContentPartAdded(**IN_A_CALL, content_index=0, part=OutputText(""))),
    ],
    "a part is done before the next is added": [repeat(10), of(SUMMARY, repeat(3))],
    "content indexes count the parts of an item, summary indexes those of its summary": [
        put(10, content_index=1),
        of(SUMMARY, put(3, summary_index=1)),
    ],
    "a part is added empty": [
        put(10, part=OutputText("Hel")),
        of(RARE, put_part(3, annotations=(frames.CITATION,))),
        of(RARE, put_part(3, logprobs=frames.spelled_delta("H").logprobs)),
        of(RARE, put(11, part=Refusal("No."))),
        of(SUMMARY, put(3, part=SummaryText("So."))),
    ],
    "a part keeps its kind": [
        put(14, part=ReasoningText("Hello!")),
        of(RARE, put(14, part=OutputText("No."))),
        of(RARE, put(8, part=Refusal("Héy"))),
    ],
    "a done part holds its text": [
        put(14, part=OutputText("Hel")),
        drop(13),
        of(RARE, put(14, part=Refusal("No"))),
        of(SUMMARY, drop(5)),
    ],
    "a done part holds its logprobs": [
        put_part(14, logprobs=frames.spelled_delta("Hello!").logprobs),
        of(RARE, put_part(8, logprobs=())),
    ],
    "a done part holds its annotations": [
        put_part(14, annotations=(frames.CITATION,)),
        of(RARE, put_part(8, annotations=())),
        of(RARE, drop(5)),
    ],
    "an event of a part comes between its added and its done event": [
        drop(10),
        copy(11, behind=14),
        repeat(14),
        of(RARE, copy(5, behind=8)),
        of(SUMMARY, copy(4, behind=6)),
    ],
    "an event carries the index of the open part": [
        *(put(at, content_index=1) for at in (11, 13, 14)),
        *(of(RARE, put(at, content_index=1)) for at in (5, 12, 13, 14)),
        *(of(SUMMARY, put(at, summary_index=1)) for at in (4, 5, 6)),
    ],
    "text events are of their part's kind": [
        instead(11, events.ReasoningTextDelta(**IN_A_MESSAGE, content_index=0, delta="Hel")),
        instead(11, events.RefusalDelta(**IN_A_MESSAGE, content_index=0, delta="Hel")),
        instead(11, events.ReasoningSummaryTextDelta(**IN_A_MESSAGE, summary_index=0, delta="Hel")),
        instead(13, events.ReasoningTextDone(**IN_A_MESSAGE, content_index=0, text="Hello!")),
    ],
    "annotations belong to text for the user": [
        of(
            RARE,
            instead(
                12, events.OutputTextAnnotationAdded(**IN_A_REFUSAL, content_index=0, annotation_index=0, annotation={})
            ),
        )
    ],
    "annotation indexes count the annotations of a part": [of(RARE, put(5, annotation_index=1)), of(RARE, repeat(5))],
    "no annotation follows the done event of its text": [of(RARE, copy(5, behind=7))],
    "deltas are never empty": [
        put(11, delta=""),
        put(17, delta=""),
        of(RARE, put(17, delta="")),
        *(of(SERVED, put(at, delta="")) for at in (18, 31, 54)),
        *(of(SERVED, put(58, delta=delta)) for delta in ({}, {"stdout": ""})),
    ],
    "no delta follows the done event of its text": [
        copy(11, behind=13),
        copy(17, behind=19),
        of(RARE, copy(12, behind=13)),
        of(RARE, copy(17, behind=18)),
        of(SERVED, copy(19, behind=20)),
        of(SERVED, copy(32, behind=34)),
    ],
    "a text is done once": [repeat(13), repeat(19), of(RARE, repeat(13)), of(RARE, repeat(18)), of(SUMMARY, repeat(5))],
    "the deltas of a text sum to the text that its done event carries": [
        drop(11),
        repeat(4),
        put(13, text="Hello"),
        put(19, arguments="{}"),
        of(RARE, put(13, refusal="No")),
        of(RARE, put(18, input="l")),
        of(SERVED, put(20, arguments="{}")),
        of(SERVED, put(33, code="2")),
        of(SERVED, put(55, command="l")),
        of(SUMMARY, drop(4)),
    ],
    # Logprobs
    "the logprobs of a text are those of its deltas": [
        put(13, logprobs=frames.spelled_delta("Hello!").logprobs),
        of(RARE, put(4, logprobs=())),
        of(RARE, put(7, logprobs=())),
    ],
    "the bytes of a text's tokens spell the text": [
        of(RARE, put_tokens(*frames.spelled_delta("He").logprobs)),
        of(RARE, put_tokens(*frames.spelled_delta("H").logprobs)),
    ],
    "alternatives come likeliest first": [of(RARE, put(6, logprobs=(replace(Y, top_logprobs=Y.top_logprobs[::-1]),)))],
    "there are no more alternatives than the request wants": [
        of((frames.started(top_logprobs=1), *RARE[1:]), lambda sent: sent)
    ],
}
"""Changes by rule; each change applies to the stream of `whole_turn` unless it names other frames."""


def in_server_turns(*changes: Change) -> list[Change]:
    return [of(SERVED, change) for change in changes]


def in_client_turn(*changes: Change) -> list[Change]:
    return [of(ASKED, change) for change in changes]


BROKEN_CALLS: dict[str, list[Change]] = {
    # Added and done items
    "an item is added in progress": [
        put_item(9, status="completed"),
        *in_server_turns(put_item(16, status="completed")),
    ],
    "a call is added empty": [
        put_item(16, arguments="{}"),
        of(RARE, put_item(16, input="l")),
        *in_server_turns(
            put_item(2, tools=(ListedTool("a", {}),)),
            put_item(2, error="No."),
            put_item(16, arguments="{"),
            put_item(16, output=""),
            put_item(29, code="1"),
            put_item(29, outputs=()),
            put_item(57, output=(frames.SHELL_OUTPUT,)),
        ),
    ],
    "a done item has ended": [
        put_item(15, status="in_progress"),
        put_item(8, status=UNSET),
        put_item(20, status="failed"),
        *in_server_turns(
            put_item(56, status="in_progress"), put_item(56, status="failed"), put_item(62, status="failed")
        ),
        *in_client_turn(put_item(16, status="in_progress"), put_item(18, status="failed")),
    ],
    "a done call holds what its events built": [
        put_item(20, arguments="{}"),
        of(RARE, put_item(19, input="")),
        *in_server_turns(
            put_item(22, arguments="{}"), put_item(36, code="1"), put_item(62, output=()), both(drop(60), drop(60))
        ),
    ],
    "an output is that of a call before it": in_server_turns(put_item(57, call_id="call_10003")),
    # Steps
    "events of calls are of their call's kind": [
        instead(11, events.FunctionCallArgumentsDelta(11, "msg_10001", 1, "{}")),
        instead(17, events.CustomToolCallInputDelta(17, "fc_10002", 2, "{}")),
        instead(17, events.McpCallInProgress(17, "fc_10002", 2)),
        instead(17, events.ShellCallCommandAdded(17, 2, 0, "")),
        of(RARE, instead(17, events.FunctionCallArgumentsDelta(17, "ctc_10002", 2, "ls"))),
        *in_server_turns(
            instead(30, events.McpCallInProgress(30, "ci_10005", 5)),
            instead(18, events.FunctionCallArgumentsDelta(18, "mcp_10003", 3, "{}")),
            instead(53, events.McpCallInProgress(53, "sh_10009", 9)),
            instead(58, events.McpCallInProgress(58, "sho_1000a", 10)),
        ),
        *in_client_turn(instead(3, events.McpCallInProgress(3, "mcpr_10000", 0))),
    ],
    "a call is in progress first": in_server_turns(drop(17), drop(24), drop(30), drop(38)),
    "a call takes one step after another, and each once": in_server_turns(
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
        *in_server_turns(
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
    "a call ends as its events say": in_server_turns(
        put_item(9, error=None),
        put_item(22, status="failed"),
        put_item(28, status="completed"),
        put_item(36, status="failed"),
        put_item(47, status="failed"),
    ),
    "an error is that of a call that failed": in_server_turns(
        put_item(28, error=None), put_item(22, error={"type": "x"})
    ),
    "an output is that of a call that completed": in_server_turns(put_item(28, output="Fine.")),
    # Shells
    "a done shell call holds the commands of its events": [
        *in_server_turns(drop(53, 54, 55), drop(55)),
        *in_client_turn(drop(13, 14, 15), drop(*range(7, 16))),
    ],
    "a command is done before the next is added": [
        *in_server_turns(drop(53), repeat(53), repeat(55)),
        *in_client_turn(drop(9), drop(10), drop(12)),
    ],
    "a command is added empty": in_server_turns(put(53, command="ls")),
    "command indexes count the commands of a call": [
        *in_server_turns(put(53, command_index=1), put(54, command_index=1), put(55, command_index=1)),
        *in_client_turn(drop(10, 11, 12)),
    ],
    "outputs come in the order of their commands": in_server_turns(
        put(58, command_index=1), put(59, command_index=1), drop(58, 59)
    ),
    "the deltas of an output sum to what its done event carries": in_server_turns(
        drop(58), repeat(58), put(58, delta={"stdout": "b"}), put(60, delta={"stdout": "b\n"})
    ),
    "an output that was begun is done": in_server_turns(
        both(put_done_item(62, output=(frames.SHELL_OUTPUT,)), drop(61))
    ),
}
"""Changes by rule; each change applies to the stream of `whole_turn` unless it names other frames."""
