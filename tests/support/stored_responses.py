"""Responses for the store to keep."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.pipeline.frames import RequestFacts, ResolvedRequest, Sampling
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.response import ConversationReference, ReasoningOptions, Response
from penstock.services.store.database import NOW, Statement
from penstock.services.store.store import Store, StoredConversation, StoredResponse

ITEMS: tuple[items.Item, ...] = (
    items.Message("msg_1", "completed", "user", (items.InputText("Grüße 🐍 \u0000 <|end|>"),)),
    items.Message("msg_2", "completed", "developer", ()),
    items.Message("msg_3", "incomplete", "assistant", (items.OutputText("It"), items.Refusal("no")), "commentary"),
    items.Message(
        "msg_4",
        "completed",
        "assistant",
        (
            items.OutputText(
                "a", ({"type": "file"},), (items.Logprob("a", (97,), -0.5, (items.TopLogprob("a", (97,), -0.5),)),)
            ),
        ),
    ),
    items.Reasoning("rs_1", (items.SummaryText("short"),), (items.ReasoningText("long"),), "sealed", "completed"),
    items.Reasoning("rs_2"),
    items.Reasoning("rs_3", content=()),
    items.FunctionCall("fc_1", "call_1", "weather", '{"city": "Rome', "incomplete"),
    items.FunctionCall("fc_2", "call_2", "weather", "{}", "completed", "maps"),
    items.FunctionCallOutput("fco_1", "call_1", "sunny", "completed"),
    items.FunctionCallOutput("fco_2", "call_1", (items.InputText("sun"), items.InputText("ny")), "completed"),
    items.CustomToolCall("ctc_1", "call_3", "shell", "ls", "completed"),
    items.CustomToolCallOutput("ctco_1", "call_3", (items.InputText("file"),), "completed"),
    items.AdditionalTools("at_1", "developer", ({"type": "function", "name": "weather"},)),
    items.LocalShellCall("lsh_1", "call_4", {"type": "exec", "command": ["ls", "-l"], "env": {}}, "completed"),
    items.LocalShellCallOutput("call_4", "a\nb\n", "incomplete"),
    items.LocalShellCallOutput("call_5", "c"),
    items.ShellCall("sh_1", "call_6", {"commands": ["ls", "pwd"], "timeout_ms": 1000}, "completed"),
    items.ShellCall(
        "sh_2", "call_7", {"commands": []}, "incomplete", {"type": "container_reference", "container_id": "c"}
    ),
    items.ShellCallOutput(
        "sho_1", "call_6", ({"stdout": "a\n", "stderr": "", "outcome": {"type": "timeout"}},), "completed"
    ),
    items.ShellCallOutput("sho_2", "call_7", (), "incomplete", 1000),
    items.ApplyPatchCall("apc_1", "call_8", {"type": "update_file", "path": "a", "diff": "-a\n+b\n"}, "completed"),
    items.ApplyPatchCallOutput("apco_1", "call_8", "failed", "no such file"),
    items.McpListTools(
        "mcpl_1", "maps", (items.ListedTool("find", {"type": "object"}, "Finds.", {"readOnlyHint": True}),)
    ),
    items.McpListTools("mcpl_2", "maps", (), "It is down."),
    items.McpCall("mcp_1", "maps", "find", "{}", "completed", "here", approval_request_id="mcpr_1"),
    items.McpCall(
        "mcp_2", "maps", "find", '{"', "failed", error={"type": "protocol_error", "code": 1, "message": "No."}
    ),
    items.McpApprovalRequest("mcpr_1", "maps", "find", "{}"),
    items.McpApprovalResponse("mcpa_1", "mcpr_1", approve=False, reason="Not now."),
    items.CodeInterpreterCall("ci_1", "print(7)", "cntr_1", "completed", ({"type": "logs", "logs": "7\n"},)),
    items.CodeInterpreterCall("ci_2", "while", "cntr_1", "failed"),
    items.WebSearchCall(
        "ws_1", "completed", {"type": "search", "query": "snakes", "sources": [{"type": "url", "url": "u"}]}
    ),
)
"""Items of every kind."""


def response(response_id: str = "resp_1", **fields: Any) -> Response:
    message = items.Message(
        f"msg_{response_id}", "completed", "assistant", (items.OutputText("Hello!"),), "final_answer"
    )
    defaults: dict[str, Any] = {
        "created_at": 1_800_000_000,
        "completed_at": 1_800_000_002,
        "status": "completed",
        "model": "tiny-gpt-oss",
        "previous_response_id": None,
        "instructions": None,
        "output": (message,),
        "tools": ({"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True},),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "top_p": 1.0,
        "temperature": 1.0,
        "reasoning": ReasoningOptions("medium", None),
        "max_output_tokens": None,
        "store": True,
        "metadata": {"order": "17"},
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
    return Response(id=response_id, **(defaults | fields))


def pop_fields(struct: type[Struct], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.pop(name) for name in struct.__struct_fields__ if name in fields}


def facts(begun: Response | None = None, **fields: Any) -> RequestFacts:
    known: dict[str, Any] = {"input": (), "sampling": Sampling(1.0, 1.0), "date": "2026-01-01"}
    return RequestFacts(response() if begun is None else begun, **(known | fields))


def stored_response(response_id: str = "resp_1", *given: items.Item, **fields: Any) -> StoredResponse:
    return StoredResponse(response(response_id, **fields), given)


def begun_response(stored: StoredResponse, **fields: Any) -> StoredResponse:
    response = replace(stored.response, status="in_progress", completed_at=None, output=(), **fields)
    return replace(stored, response=response, tokens={})


def queued_response(response_id: str = "resp_1", *given: items.Item, **fields: Any) -> StoredResponse:
    return stored_response(response_id, *given, **{"status": "queued", "output": (), "background": True, **fields})


def request_of(stored: StoredResponse) -> ResolvedRequest:
    return ResolvedRequest(facts(stored.response, input=stored.input, origin=stored.origin))


async def store_response(store: Store, stored: StoredResponse) -> None:
    store.begin(begun_response(stored))
    await store.end(stored, None)


def stored_conversation(conversation_id: str = "conv_1", **metadata: str) -> StoredConversation:
    return StoredConversation(conversation_id, 1_800_000_000, metadata)


def conversation_response(
    response_id: str, *given: items.Item, conversation_id: str = "conv_1", **fields: Any
) -> StoredResponse:
    return stored_response(response_id, *given, conversation=ConversationReference(conversation_id), **fields)


async def execute_sql(store: Store, sql: str) -> None:
    await store.writer.carry_out([Statement(sql, ())])


async def expire_heartbeats(store: Store) -> None:
    await execute_sql(store, "update servers set beat_at = beat_at - 60")


async def expire_heartbeat(store: Store, url: str) -> None:
    await execute_sql(store, f"update servers set beat_at = 0 where url = '{url}'")


async def living_servers(store: Store) -> int:
    """Count the servers whose heartbeat was not set back."""
    ((count,),) = await store.servers.context.read(f"select count(*) from servers where beat_at > {NOW} - 30")
    return int(count)


async def history_of(store: Store, response_id: str) -> History:
    """Return the history that a request continues with this response."""
    return await store.history(await store.chain(response_id, ""))
