"""The verdict of each field of a request, as the SDK's types have it, and that the server keeps to it.

What restricts or changes an answer is done, or is a 400 that names it.  A new version of the SDK with fields that stand
in no table here fails.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseIncludable, ResponseInputItemParam, ResponsesClientEventParam, ToolParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.responses_client_event_param import ResponseCreate

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import fingerprint_of
from penstock.pipeline.protocol.params.validation import read_request
from tests.support.paths import ROOT
from tests.support.sdk_types import IMAGE, OPENAI, Verdicts, choices, fields_of, name_of
from tests.support.server import ScriptedServer, script
from tests.support.socket_client import connected
from tests.support.tool_servers import serving_everything

Json: TypeAlias = Any

UNKNOWN = "of_tomorrow"
"""A field that no type has."""

BODY = name_of(OPENAI.body)
"""The type of the body, whose own fields are in the tables of the page."""

TAKEN: Mapping[str, str] = {
    "BackgroundOptions": "completion_window",
    "ContextManagement": "compact_threshold type",
    "PromptCacheOptions": "prewarm",
    "Reasoning": "context effort generate_summary mode summary",
    "ResponseConversationParamParam": "id",
    "StreamOptions": "include_obfuscation",
    "ResponseTextConfigParam": "format verbosity",
    "ResponseFormatText": "type",
    "ResponseFormatTextJSONSchemaConfigParam": "description name schema strict type",
    "ResponseFormatJSONObject": "type",
    "ToolChoiceAllowedParam": "mode tools type",
    "ToolChoiceTypesParam": "type",
    "ToolChoiceFunctionParam": "name type",
    "ToolChoiceMcpParam": "name server_label type",
    "ToolChoiceCustomParam": "name type",
    "ToolChoiceApplyPatchParam": "type",
    "ToolChoiceSpecificProgrammaticToolCallingParam": "type",
    "ToolChoiceShellParam": "type",
    **dict.fromkeys(
        ("FunctionToolParam", "ToolFunction"),
        "allowed_callers async defer_loading description name output_schema parameters strict type",
    ),
    "ProgrammaticToolCalling": "type",
    "CustomToolParam": "allowed_callers async defer_loading description format name type",
    "Text": "format type",
    "Grammar": "definition syntax type",
    "NamespaceToolParam": "description name tools type",
    "WebSearchToolParam": "external_web_access filters search_context_size type user_location",
    "WebSearchPreviewToolParam": "search_content_types search_context_size type user_location",
    "Filters": "allowed_domains",
    "UserLocation": "city country region timezone type",
    "Mcp": "allowed_callers allowed_tools authorization connector_id defer_loading headers require_approval"
    " server_description server_label server_url tunnel_id type",
    "McpAllowedToolsMcpToolFilter": "read_only tool_names",
    "McpRequireApprovalMcpToolApprovalFilter": "always never",
    "McpRequireApprovalMcpToolApprovalFilterAlways": "read_only tool_names",
    "McpRequireApprovalMcpToolApprovalFilterNever": "read_only tool_names",
    "CodeInterpreter": "allowed_callers container type",
    "CodeInterpreterContainerCodeInterpreterToolAuto": "file_ids memory_limit network_policy type",
    "FunctionShellToolParam": "allowed_callers environment type",
    "ContainerAutoParam": "file_ids memory_limit network_policy skills type",
    "LocalEnvironmentParam": "skills type",
    "LocalSkillParam": "description name path",
    "ContainerNetworkPolicyDisabledParam": "type",
    "LocalShell": "type",
    "ApplyPatchToolParam": "allowed_callers type",
    "AdditionalTools": "id role tools type",
    "EasyInputMessageParam": "content phase role type",
    "Message": "content role status type",
    "ResponseOutputMessageParam": "content id phase role status type",
    "ResponseInputTextParam": "text type",
    "ResponseInputTextContentParam": "text type",
    "ResponseInputImageParam": "file_id image_url type",
    "ResponseInputImageContentParam": "file_id image_url type",
    **dict.fromkeys(
        ("ResponseInputFileParam", "ResponseInputFileContentParam"), "file_data file_id file_url filename type"
    ),
    "ResponseOutputTextParam": "annotations logprobs text type",
    "AnnotationFileCitation": "file_id filename index type",
    "AnnotationURLCitation": "end_index start_index title type url",
    "AnnotationContainerFileCitation": "container_id end_index file_id filename start_index type",
    "AnnotationFilePath": "file_id index type",
    "Logprob": "bytes logprob token top_logprobs",
    "LogprobTopLogprob": "bytes logprob token",
    "ResponseOutputRefusalParam": "refusal type",
    "ResponseReasoningItemParam": "content encrypted_content id status summary type",
    "Summary": "text type",
    "Content": "text type",
    "ResponseCompactionItemParamParam": "encrypted_content id type",
    "CompactionTrigger": "id type",
    "ResponseConfigurationUpdateItemParamParam": "id reasoning text type",
    "ItemReference": "id type",
    "ResponseFunctionToolCallParam": "arguments async call_id caller id name namespace status type",
    "FunctionCallOutput": "call_id caller id output status type",
    "ResponseCustomToolCallParam": "call_id caller id input name namespace type",
    "ResponseCustomToolCallOutputParam": "call_id caller id output type",
    **{f"{kind}CallerDirect": "type" for kind in ("", "FunctionCallOutput", "ShellCall")},
    **{f"{kind}CallerProgram": "caller_id type" for kind in ("", "FunctionCallOutput", "ShellCall")},
    "Program": "call_id code fingerprint id type",
    "ProgramOutput": "call_id id result status type",
    "ComputerToolParam": "type",
    "ComputerUsePreviewToolParam": "display_height display_width environment type",
    "ComputerCallOutput": "acknowledged_safety_checks call_id id output status type",
    "ComputerCallOutputAcknowledgedSafetyCheck": "code id message",
    "ResponseComputerToolCallOutputScreenshotParam": "file_id image_url type",
    "ToolSearchToolParam": "description execution parameters type",
    "ToolSearchCall": "arguments call_id execution id status type",
    "LocalShellCall": "action call_id id status type",
    "LocalShellCallAction": "command env timeout_ms type user working_directory",
    "LocalShellCallOutput": "id output status type",
    "ShellCall": "action call_id caller environment id status type",
    "ShellCallAction": "commands max_output_length timeout_ms",
    "ShellCallOutput": "call_id id max_output_length output status type",
    "ResponseFunctionShellCallOutputContentParam": "outcome stderr stdout",
    "OutcomeTimeout": "type",
    "OutcomeExit": "exit_code type",
    "ApplyPatchCall": "call_id id operation status type",
    "ApplyPatchCallOperationCreateFile": "diff path type",
    "ApplyPatchCallOperationDeleteFile": "path type",
    "ApplyPatchCallOperationUpdateFile": "diff path type",
    "ApplyPatchCallOutput": "call_id id output status type",
    "ResponseFunctionWebSearchParam": "action id status type",
    "ActionSearch": "queries query sources type",
    "ActionSearchSource": "type url",
    "ActionOpenPage": "type url",
    "ActionFind": "pattern type url",
    "ResponseCodeInterpreterToolCallParam": "code container_id id outputs status type",
    "OutputLogs": "logs type",
    "OutputImage": "type url",
    "McpListTools": "error id server_label tools type",
    "McpListToolsTool": "annotations description input_schema name",
    "McpApprovalRequest": "arguments id name server_label type",
    "McpApprovalResponse": "approval_request_id approve id reason type",
    "McpCall": "approval_request_id arguments error id name output server_label status type",
    "McpProtocolError": "code message type",
    "McpToolExecutionError": "content type",
    "HTTPError": "code message type",
}
"""The fields of objects that have an effect, are part of what the model or the client reads, or are refused."""

CALLED = ("ShellCallOutput", "ApplyPatchCall", "ApplyPatchCallOutput")
"""The calls and outputs that no program makes here."""

IDLE: Mapping[str, str] = {
    **dict.fromkeys(("FunctionCallOutput.name", "FunctionCallOutput.namespace"), "its call has it"),
    "ResponseCustomToolCallParam.async": "what was called is history",
    "BackgroundOptions.continuation_id": "no response waits for a cheaper hour",
    **dict.fromkeys(
        (f"{image}.detail" for image in ("ResponseInputImageParam", "ResponseInputImageContentParam")),
        "vLLM sizes images by the model",
    ),
    **dict.fromkeys(
        (f"{file}.detail" for file in ("ResponseInputFileParam", "ResponseInputFileContentParam")),
        "a model reads the text of a file",
    ),
    **dict.fromkeys(
        (
            f"{part}.prompt_cache_breakpoint"
            for kind in ("Text", "Image", "File")
            for part in (f"ResponseInput{kind}Param", f"ResponseInput{kind}ContentParam")
        ),
        "vLLM caches prefixes by itself",
    ),
    **dict.fromkeys(("PromptCacheBreakpoint.mode", "PromptCacheBreakpoint.ttl"), "vLLM caches prefixes by itself"),
    **dict.fromkeys(
        (f"PromptCacheOptions.{field}" for field in ("comparison_response_id", "mode", "ttl")),
        "vLLM caches prefixes by itself",
    ),
    **dict.fromkeys(
        (
            f"{kind}{field}"
            for kind in CALLED
            for field in (".caller", "CallerDirect.type", "CallerProgram.type", "CallerProgram.caller_id")
        ),
        "what was called is history",
    ),
}
"""The fields that are accepted and have no effect, with the reason: none of them restricts or changes an answer."""

NOT_RUN = (*("FileSearchToolParam", "ImageGeneration"),)
"""The tools that this server does not run."""

ALLOWLIST = "ContainerNetworkPolicyAllowlistParam"

NOT_HERE: Mapping[str, str | None] = {
    "AccessPrograms": "access_programs",
    "Image": "image",
    "Moderation": "moderation",
    "ResponsePromptParam": "prompt",
    **dict.fromkeys(NOT_RUN, "tools[0].type"),
    **dict.fromkeys(("SkillReferenceParam", "InlineSkillParam"), "tools[0].environment.skills"),
    "ContainerReferenceParam": "tools[0].environment.container_id",
    ALLOWLIST: "tools[0].container.network_policy.type",
    **dict.fromkeys(("ResponseFileSearchToolCallParam", "ImageGenerationCall"), None),
    "ResponseToolSearchOutputItemParamParam": None,
    "ResponseComputerToolCallParam": None,
}
"""The objects that are refused with all of their fields, by the path in ``param``.

None stands for items that are passed over, for one that repeats the tools of a request, and for actions as they came.
"""

REFUSED: Mapping[str, str | None] = {
    **dict.fromkeys(
        (f"BackgroundOptions.completion_window={window}" for window in ("2h", "8h")),
        "background_options.completion_window",
    ),
    "PromptCacheOptions.prewarm=true": "prompt_cache_options.prewarm",
    "Reasoning.mode": "reasoning.mode",
    "Reasoning.mode=standard": None,
    "ContextManagement.type": "context_management[0].type",
    f"{BODY}.tool_choice:ToolChoiceTypesParam": "tool_choice",
    **dict.fromkeys(
        (
            f"ToolChoiceTypesParam.type={kind}"
            for kind in ("file_search", "computer", "computer_use_preview", "computer_use", "image_generation")
        ),
        "tool_choice",
    ),
    **dict.fromkeys(
        (
            f"{tool}.allowed_callers=programmatic"
            for tool in (
                *("FunctionToolParam", "CustomToolParam", "Mcp", "CodeInterpreter", "FunctionShellToolParam"),
                "ApplyPatchToolParam",
            )
        ),
        "tools[0].allowed_callers",
    ),
    "ToolFunction.allowed_callers=programmatic": "tools[0].tools[0].allowed_callers",
    **dict.fromkeys(
        (f"{tool}.defer_loading=true" for tool in ("FunctionToolParam", "CustomToolParam", "Mcp")),
        "tools[0].defer_loading",
    ),
    "ToolFunction.defer_loading=true": "tools[0].tools[0].defer_loading",
    "CustomToolParam.async=true": "tools[0].async",
    "WebSearchToolParam.external_web_access=false": "tools[0].external_web_access",
    "WebSearchPreviewToolParam.search_content_types=image": "tools[0].search_content_types",
    "Mcp.connector_id": "tools[0].connector_id",
    "Mcp.tunnel_id": "tools[0].tunnel_id",
    **{
        f"{of_sdk}.{field}": f"tools[0].{place}.{field}"
        for of_sdk, place in (
            ("CodeInterpreterContainerCodeInterpreterToolAuto", "container"),
            ("ContainerAutoParam", "environment"),
        )
        for field in ("file_ids", "memory_limit")
    },
    f"ContainerAutoParam.network_policy:{ALLOWLIST}": "tools[0].environment.network_policy.type",
    "ResponseInputImageParam.file_id": "input[0].content[0].file_id",
    "ResponseInputImageContentParam.file_id": "input[1].output[0].file_id",
    "ResponseComputerToolCallOutputScreenshotParam.file_id": "input[1].output.file_id",
    **{
        f"{part}.{field}": f"{place}{end}"
        for part, place in (
            ("ResponseInputFileParam", "input[0].content[0]"),
            ("ResponseInputFileContentParam", "input[1].output[0]"),
        )
        for field, end in (("file_id", ".file_id"), ("file_url", ""))  # a file_url beside the file_data
    },
    "AdditionalTools.tools:Mcp": "input[0].tools[0].server_url",
    **{f"AdditionalTools.tools:{tool}": "input[0].tools[0].type" for tool in NOT_RUN},
    "ShellCall.environment:ContainerReferenceParam": None,
}
"""The fields and values that are refused, by the path in ``param``; None for some that are taken all the same."""

VERDICTS = Verdicts(TAKEN, IDLE, NOT_HERE, REFUSED)

PROGRAM: Json = {"type": "program", "call_id": "call_1", "code": "x", "fingerprint": fingerprint_of("x")}

CALLS: Mapping[str, Json] = {
    "program_output": PROGRAM,
    "function_call_output": {"type": "function_call", "call_id": "call_1", "name": "x", "arguments": "{}"},
    "custom_tool_call_output": {"type": "custom_tool_call", "call_id": "call_1", "name": "x", "input": "x"},
    "computer_call_output": {"type": "computer_call", "call_id": "call_1"},
    "tool_search_output": {"type": "tool_search_call", "call_id": "call_1"},
    "local_shell_call_output": {
        "type": "local_shell_call",
        "call_id": "msg_1",
        "action": {"command": []},
    },
    "shell_call_output": {"type": "shell_call", "call_id": "call_1", "action": {"commands": []}},
    "apply_patch_call_output": {
        "type": "apply_patch_call",
        "call_id": "call_1",
        "operation": {"type": "delete_file", "path": "x"},
    },
    "mcp_approval_response": {
        "type": "mcp_approval_request",
        "id": "x",
        "arguments": "{}",
        "name": "x",
        "server_label": "x",
    },
}
"""The calls that stand before an output, by the type of the output."""

OUTPUTS: Mapping[str, Json] = {
    "function_call": {"type": "function_call_output", "call_id": "call_1", "output": "x"},
    "custom_tool_call": {"type": "custom_tool_call_output", "call_id": "call_1", "output": "x"},
    "computer_call": {
        "type": "computer_call_output",
        "call_id": "call_1",
        "output": {"type": "computer_screenshot", "image_url": IMAGE},
    },
    "tool_search_call": {"type": "tool_search_output", "call_id": "call_1", "tools": []},
    "local_shell_call": {"type": "local_shell_call_output", "id": "call_1", "output": "x"},
    "shell_call": {"type": "shell_call_output", "call_id": "call_1", "output": []},
    "apply_patch_call": {"type": "apply_patch_call_output", "call_id": "call_1"},
    "program": {"type": "program_output", "call_id": "call_1", "result": "x", "status": "completed"},
}
"""The outputs that stand behind a call, by the type of the call."""

CHOSEN = [
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "web_search"},
    {"type": "code_interpreter"},
    {"type": "programmatic_tool_calling"},
    {"type": "mcp", "server_label": "x", "server_url": "https://mcp.invalid"},
]
"""Tools to choose from, beside a function or a custom tool named ``x``."""

COUNTED = frozenset({"input", "tools", "tool_choice", "text", "reasoning"})
"""The parameters that are also those of counting the input tokens: nothing runs then, no tool and no MCP server."""


def in_request(fields: Mapping[str, Json], ids: Mapping[str, str]) -> Json:
    """The body of a request with the fields, and with what they need beside them."""
    if "tool_choice" in fields:
        kind = "custom" if fields["tool_choice"]["type"] == "custom" else "function"
        return {"input": "Hi", "tools": [{"type": kind, "name": "x"}, *CHOSEN], **fields}
    if "conversation" in fields:
        return {"input": "Hi", "conversation": {"id": ids["conversation"]}}
    if not isinstance(fields.get("input"), list):
        return {"input": "Hi", **fields}
    (item,) = fields["input"]
    kind = item.get("type", "")
    item = {**item, **{field: ids[kind] for field in ("encrypted_content", "id") if kind in ids and field in item}}
    beside = [*filter(None, [CALLS.get(kind), item, OUTPUTS.get(kind)])]
    caller = item.get("caller", {})
    if program := caller.get("caller_id"):
        called = {"type": "program", "caller_id": program}
        beside = [{**PROGRAM, "call_id": program}, *({"caller": called, **each} for each in beside)]
    user = {"role": "user", "content": "Hi"}
    return {"input": [user, item] if kind == "compaction_trigger" else [*beside, user]}


async def stored_ids(served: ScriptedServer) -> dict[str, str]:
    """Store what items and parameters may refer to; return the ids and the sealed content by the type of the item."""
    served.engine.script = script()
    _, earlier = await served.post({"input": "Hi"})
    _, compacted = await served.post({"model": "tiny", "input": "Hi"}, "/v1/responses/compact")
    (sealed,) = [item for item in compacted["output"] if item["type"] == "compaction"]
    _, conversation = await served.post({}, "/v1/conversations")
    ids: dict[str, str] = {"compaction": sealed["encrypted_content"], "conversation": conversation["id"]}
    return ids | dict.fromkeys(("item_reference", ""), str(earlier["output"][-1]["id"]))


async def test_server_keeps_to_the_verdict_of_every_field(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with serving_everything(tmp_path) as served:
        ids = await stored_ids(served)
        for probe in OPENAI.probes(NOT_HERE):
            if probe.name.startswith(BODY) and ":" not in probe.name:
                continue
            door = "/v1/responses/input_tokens" if probe.value.keys() <= COUNTED else "/v1/responses"
            status, answer = await served.post(in_request(probe.value, ids), door)
            param = VERDICTS.expected(probe.name)
            if (status, (answer.get("error") or {}).get("param")) != (400 if param else 200, param):
                wrong.append(f"{probe.name}: {status} {answer.get('error')}")
    assert wrong == []


ENDS = ("response.completed", "error")
"""The events that end a request for no output."""

OF_EVENTS = {
    "response.create": {"generate", "stream", "stream_id", "type"},
    "response.steer": {"input", "previous_response_id", "type"},
}
"""The fields of each event of a client over a WebSocket, but for those of the body: tests of sockets have them."""


def test_every_field_of_an_event_of_the_sdk_has_a_verdict() -> None:
    found: dict[str, set[str]] = {}
    for event in get_args(ResponsesClientEventParam):
        fields = get_type_hints(event)
        of_body = get_type_hints(ResponseCreateParamsBase).keys() if event is ResponseCreate else set()
        found |= {kind: fields.keys() - of_body for kind in get_args(fields["type"])}
    assert found == OF_EVENTS
    assert get_type_hints(ResponseCreateParamsBase).keys() <= get_type_hints(ResponseCreate).keys()


async def test_socket_keeps_to_the_verdict_of_every_field(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with serving_everything(tmp_path) as served, connected(served) as client:
        ids = await stored_ids(served)
        for probe in OPENAI.probes(NOT_HERE):
            if (probe.name.startswith(BODY) and ":" not in probe.name) or "background" in probe.value:
                continue  # no response of a socket runs in the background
            await client.send(generate=False, **in_request(probe.value, ids))
            while (frame := await client.frame())["type"] not in ENDS:
                pass
            param = VERDICTS.expected(probe.name)
            if (frame["type"], (frame.get("error") or {}).get("param")) != ("error" if param else ENDS[0], param):
                wrong.append(f"{probe.name}: {frame}")
    assert wrong == []


def test_every_field_of_the_sdk_has_a_verdict() -> None:
    verdicts, found = VERDICTS.fields, OPENAI.objects(NOT_HERE)
    del found[BODY]
    assert verdicts == found


KEPT = (
    *("AnnotationFileCitation", "AnnotationURLCitation", "AnnotationContainerFileCitation", "AnnotationFilePath"),
    *(
        "Logprob",
        "LogprobTopLogprob",
        "ComputerCallOutputAcknowledgedSafetyCheck",
        "ActionSearch",
        "ActionSearchSource",
    ),
    *("ActionOpenPage", "ActionFind", "OutputLogs", "OutputImage", "LocalShellCallAction", "ShellCallAction"),
    *("OutcomeTimeout", "OutcomeExit", "ResponseFunctionShellCallOutputContentParam", "McpProtocolError"),
    *("ApplyPatchCallOperationCreateFile", "ApplyPatchCallOperationDeleteFile", "ApplyPatchCallOperationUpdateFile"),
    *("McpToolExecutionError", "HTTPError"),
)
"""Objects in items of the past, of which the server keeps what it knows: no stage reads a field of them."""


def test_unknown_field_of_every_object_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    silent: list[str] = []
    caplog.set_level(logging.INFO)
    for probe in replace(OPENAI, unknown=UNKNOWN).probes(NOT_HERE):
        caplog.clear()
        if probe.name.startswith(f"{BODY}.tool_choice=") or probe.name == f"ResponseConversationParamParam.{UNKNOWN}":
            continue  # these have no place in the body of this table
        with suppress(InvalidRequest):
            read_request(json.dumps(in_request(probe.value, {"conversation": "conv_1"})).encode())
            is_logged = any("Ignored unknown parameters" in line for line in caplog.messages)
            of_sdk, _, field = probe.field.partition(".")
            if is_logged != (field == UNKNOWN and of_sdk in {BODY, *TAKEN}.difference(KEPT)):
                silent.append(f"{probe.name}: {caplog.messages}")
    assert not silent, "\n".join(silent)


def test_page_names_every_refused_field() -> None:
    page = (ROOT / "docs" / "PARAMETERS.md").read_text()
    refused = {name.partition("=")[0].partition(":")[0].split(".")[-1] for name, param in REFUSED.items() if param}
    assert {field for field in refused - {"type"} if f"`{field}" not in page} == set()


PAGE = (ROOT / "docs" / "PARAMETERS.md").read_text()


def promises(section: str) -> dict[str, str]:
    """The promise of the page about each name in the table of a section."""
    table = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (\w+) \|", table, re.MULTILINE)
    named = [(name, promise) for names, promise in rows for name in re.findall(r"`([\w.]+)`", names)]
    assert len(dict(named)) == len(named)
    return dict(named)


def by_type(union: Any) -> dict[str, Json]:
    """A minimal object for each type of a union."""
    return {
        kind: {**OPENAI.minimal(choice), "type": kind}
        for choice in choices(union)
        for literal in choices(fields_of(choice)["type"])
        for kind in get_args(literal)
    }


UNSPOKEN = frozenset({"mcp_approval_request", "mcp_list_tools"})
"""Items without words of their own: a question without its answer, and an empty list."""

UNCOUNTED = frozenset({"mcp"})
"""Tools that are not in the prompt yet when tokens are counted."""


def ended_items() -> dict[str, Json]:
    """A minimal item of each type, ended if it has a status; a message without a type is one, too."""
    of_sdk = by_type(ResponseInputItemParam) | {"message": {"type": "message", "role": "user", "content": "x"}}
    return {kind: {**item, **({"status": "completed"} if "status" in item else {})} for kind, item in of_sdk.items()}


async def test_page_keeps_its_promise_of_every_item(tmp_path: Path) -> None:
    wrong: list[str] = []
    lines, of_sdk = promises("Items"), ended_items()
    assert sorted(lines) == sorted(of_sdk)
    async with serving_everything(tmp_path, ()) as served:
        ids = await stored_ids(served)
        await served.post({"input": [{"role": "user", "content": "Hi"}]})
        plain = served.prompt_text()
        for kind, promise in lines.items():
            status, answer = await served.post(in_request({"input": [of_sdk[kind]]}, ids))
            if status != 200:
                seen = "refused" if str(answer["error"]["param"]).startswith("input[") else f"{status} {answer}"
            else:
                is_read = kind in UNSPOKEN or served.prompt_text() != plain
                seen = "implemented" if is_read else "accepted"
            if seen != promise:
                wrong.append(f"{kind}: {promise} on the page, but {seen}")
    assert not wrong, "; ".join(wrong)


async def test_page_keeps_its_promise_of_every_tool(tmp_path: Path) -> None:
    wrong: list[str] = []
    lines, of_sdk = promises("Tools"), by_type(ToolParam)
    assert sorted(lines) == sorted(of_sdk)
    async with serving_everything(tmp_path, ("browser", "container", "file_search", "program", "python")) as served:
        _, plain = await served.post({"input": "Hi"}, "/v1/responses/input_tokens")
        for kind, promise in lines.items():
            body = {"input": "Hi", "tools": [of_sdk[kind]]}
            status, answer = await served.post(body, "/v1/responses/input_tokens")
            if status == 200:
                is_read = kind in UNCOUNTED or answer["input_tokens"] > plain["input_tokens"]
                seen = "implemented" if is_read else "accepted"
            else:
                seen = "refused" if answer["error"]["param"] == "tools[0].type" else f"{status} {answer}"
            if seen != promise:
                wrong.append(f"{kind}: {promise} on the page, but {seen}")
    assert wrong == []


async def test_page_has_every_value_to_include(tmp_path: Path) -> None:
    lines = promises("Include values")
    assert sorted(lines) == sorted(get_args(ResponseIncludable))
    assert set(lines.values()) == {"implemented", "accepted"}
    async with serving_everything(tmp_path) as served:
        served.engine.script = script()
        for name in lines:
            status, _ = await served.post({"input": "Hi", "include": [name]})
            assert status == 200
        status, answer = await served.post({"input": "Hi", "include": ["message.mood"]})
        assert (status, answer["error"]["param"]) == (400, "include[0]")
