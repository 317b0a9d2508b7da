"""The verdict of each field of a message's body, as anthropic-python's types have it, and that the server keeps to it.

A new version of the SDK with fields that stand in no table here fails.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from penstock.extensions.dialects.messages.dialect import read, read_prompt
from penstock.pipeline.errors import InvalidRequest
from tests.support.documents import as_base64, pdf
from tests.support.mcp_tools import PIXEL
from tests.support.sdk_types import SCHEMA, BodyTypes, Probe, Verdicts
from tests.support.server import script
from tests.support.tool_servers import serving_everything

Json: TypeAlias = Any

CREATE, COUNT = "MessageCreateParamsNonStreaming", "MessageCountTokensParams"
"""The types of the bodies."""

HEADERS = ("betas", "user_profile_id", "workspace_id")
"""The parameters that the SDK sends as headers."""

CODE_EXECUTION = tuple(
    f"CodeExecutionTool{version}Param" for version in ("20250522", "20250825", "20260120", "20260521")
)
WEB_SEARCH = tuple(f"WebSearchTool{version}Param" for version in ("20250305", "20260209", "20260318"))
COMPUTERS = tuple(f"ToolComputerUse{version}Param" for version in ("20241022", "20250124"))
CLIENT_TOOLS = (
    *("MemoryTool20250818Param", "ToolBash20241022Param", "ToolBash20250124Param"),
    *(f"ToolTextEditor{version}Param" for version in ("20241022", "20250124", "20250429", "20250728")),
)
"""The tools that the client runs."""

TAKEN: Mapping[str, str] = {
    CREATE: "compaction context_management inference_geo max_tokens mcp_servers messages model output_config"
    " stop_sequences stream system thinking thread tool_choice tools",
    COUNT: "context_management mcp_servers messages model output_config system thinking tool_choice tools",
    "AllThinkingTurnsParam": "type",
    "AssistantMessageParam": "content role",
    "Base64ImageSourceParam": "data media_type type",
    "Base64PDFSourceParam": "data media_type type",
    **dict.fromkeys(("CitationsConfigParam", "CitationsConfigParamParam"), "enabled"),
    "ClearThinking20251015EditParam": "keep type",
    "CodeExecutionResultBlockParam": "return_code stdout type",
    **dict.fromkeys(CODE_EXECUTION, "allowed_callers defer_loading name type"),
    "CodeExecutionToolResultBlockParam": "content tool_use_id type",
    "CodeExecutionToolResultErrorParam": "type",
    "CompactionBlockParam": "content tool_changes type",
    "CompactionConfigParam": "instructions type",
    "ContainerParams": "id skills",
    "ContentBlockSourceParam": "content type",
    "ContextManagementConfigParam": "edits",
    **dict.fromkeys(("DocumentBlockParam", "RequestDocumentBlockParam"), "citations context source title type"),
    "EncryptedCodeExecutionResultBlockParam": "return_code type",
    "FileDocumentSourceParam": "file_id type",
    "FileImageSourceParam": "file_id type",
    "ImageBlockParam": "source transformations type",
    "ImageTransformationsParam": "oversized_image",
    "InputSchemaTyped": "properties required type",
    "JSONOutputFormatParam": "schema type",
    "OutputConfigParam": "effort format task_budget",
    "PlainTextSourceParam": "data media_type type",
    "RedactedThinkingBlockParam": "data type",
    "RequestToolAdditionBlockParam": "tool type",
    "RequestToolRemovalBlockParam": "tool type",
    "SearchResultBlockParam": "citations content source title type",
    "DirectCallerParam": "type",
    **dict.fromkeys(("ServerToolCallerParam", "ServerToolCaller20260120Param"), "tool_id type"),
    "ServerToolUseBlockParam": "caller id input name type",
    "SystemMessageOutputConfigParam": "effort",
    "SystemMessageParam": "clear_at content output_config role",
    "TextBlockParam": "text type",
    "ThinkingBlockParam": "signature thinking type",
    "ThinkingConfigAdaptiveParam": "block_binding display type",
    "ThinkingConfigBetweenToolsParam": "type",
    "ThinkingConfigDisabledParam": "type",
    "ThinkingConfigEnabledParam": "block_binding budget_tokens display type",
    "ThinkingTurnsParam": "type value",
    "ThreadContinueParams": "previous_message_id type",
    "ThreadCreateParams": "type",
    **dict.fromkeys(CLIENT_TOOLS, "allowed_callers defer_loading input_examples name strict type"),
    **dict.fromkeys(
        COMPUTERS, "allowed_callers defer_loading display_height_px display_width_px input_examples name strict type"
    ),
    "ToolComputerUse20251124Param": "allowed_callers defer_loading display_height_px display_width_px enable_zoom"
    " input_examples name strict type",
    "ToolChangeToolDefinitionParam": "definition type",
    "ToolChangeToolReferenceParam": "name type",
    "ToolChoiceAnyParam": "disable_parallel_tool_use type",
    "ToolChoiceAutoParam": "disable_parallel_tool_use type",
    "ToolChoiceNoneParam": "type",
    "ToolChoiceToolParam": "disable_parallel_tool_use name type",
    "ToolParam": "allowed_callers defer_loading description input_examples input_schema name strict type",
    "ToolReferenceBlockParam": "tool_name type",
    "ToolResultBlockParam": "content is_error tool_use_id type",
    "ToolUseBlockParam": "caller id input name type",
    "URLImageSourceParam": "type url",
    "URLPDFSourceParam": "type url",
    "UserLocationParam": "city country region timezone type",
    "UserMessageParam": "content role",
    "WebSearchResultBlockParam": "type url",
    **dict.fromkeys(
        WEB_SEARCH, "allowed_callers allowed_domains blocked_domains defer_loading max_uses name type user_location"
    ),
    "WebSearchToolRequestErrorObjectParam": "type",
    "WebSearchToolResultBlockParam": "content tool_use_id type",
}
"""The fields that have an effect, are part of what the model reads, or are refused."""

CACHED = (
    *(CREATE, COUNT, *CLIENT_TOOLS, *CODE_EXECUTION, *COMPUTERS, *WEB_SEARCH, "ToolComputerUse20251124Param"),
    *(
        "CodeExecutionToolResultBlockParam",
        "CompactionBlockParam",
        "DocumentBlockParam",
        "ImageBlockParam",
        "RequestDocumentBlockParam",
    ),
    *("RequestToolAdditionBlockParam", "RequestToolRemovalBlockParam", "SearchResultBlockParam", "TextBlockParam"),
    *("ServerToolUseBlockParam", "ToolParam", "ToolReferenceBlockParam", "ToolResultBlockParam", "ToolUseBlockParam"),
    "WebSearchToolResultBlockParam",
)
"""The objects that may be the end of a part of the prompt that is cached."""

CITATIONS = {
    "CharLocation": "cited_text document_index document_title end_char_index start_char_index type",
    "ContentBlockLocation": "cited_text document_index document_title end_block_index start_block_index type",
    "PageLocation": "cited_text document_index document_title end_page_number start_page_number type",
    "SearchResultLocation": "cited_text end_block_index search_result_index source start_block_index title type",
    "WebSearchResultLocation": "cited_text encrypted_index title type url",
}
"""The fields of citations of an earlier answer."""

IDLE: Mapping[str, str] = {
    **{f"{cached}.cache_control": "the engine caches prefixes by itself" for cached in CACHED},
    **{f"CacheControlEphemeralParam.{field}": "the engine caches prefixes by itself" for field in ("ttl", "type")},
    **{
        f"{body}.{header}": "the SDK sends it as a header, and this server has no accounts"
        for body in (CREATE, COUNT)
        for header in HEADERS
    },
    **{f"{body}.billing_policy": "nothing is billed" for body in (CREATE, COUNT)},
    **{f"{body}.speed": "an engine has one speed" for body in (CREATE, COUNT)},
    f"{COUNT}.compaction": "Anthropic counts the conversation as it is, too",
    f"{CREATE}.diagnostics": "it asks for words about the cache, which Anthropic does not promise",
    "DiagnosticsParam.previous_message_id": "it asks for words about the cache, which Anthropic does not promise",
    f"{CREATE}.fallback_credit_token": "nothing is billed",
    f"{CREATE}.fallbacks": "no policy declines a request here",
    f"{CREATE}.metadata": "it tells abuse apart, and is no part of a prompt",
    "MetadataParam.user_id": "it tells abuse apart, and is no part of a prompt",
    f"{CREATE}.service_tier": "there is one tier",
    **{
        f"Citation{kind}Param.{field}": "what was cited is history"
        for kind, fields in CITATIONS.items()
        for field in fields.split()
    },
    "TextBlockParam.citations": "what was cited is history",
    f"{CREATE}.container": "the messages have all that a program needs",
    "WebSearchToolResultBlockParam.caller": "its call has it",
    **{
        f"{block}.toolset_name": "the name of a call is whole"
        for block in ("ToolUseBlockParam", "ToolResultBlockParam")
    },
    **{f"{tool}.strict": "the server checks the calls of its own tools" for tool in (*CODE_EXECUTION, *WEB_SEARCH)},
    "WebSearchTool20260318Param.response_inclusion": "a message shows all that a program does",
    "ToolParam.eager_input_streaming": "the input of a call is streamed as the model writes it",
    "ToolTextEditor20250728Param.max_characters": "the client cuts what it shows",
    **{
        f"{computer}.display_number": "the client knows its display"
        for computer in (*COMPUTERS, "ToolComputerUse20251124Param")
    },
    **{
        f"WebSearchResultBlockParam.{field}": "the model has read the page"
        for field in ("encrypted_content", "page_age")
    },
    "WebSearchResultBlockParam.title": "the model has read the page",
    "WebSearchToolRequestErrorObjectParam.error_code": "a search has found pages, or has not",
    "CodeExecutionToolResultErrorParam.error_code": "a program has an output, or has not",
    "EncryptedCodeExecutionResultBlockParam.encrypted_stdout": "only Anthropic can read it",
    **{
        f"{result}.{field}": "this server writes all output of a program to stdout, and no files"
        for result in ("CodeExecutionResultBlockParam", "EncryptedCodeExecutionResultBlockParam")
        for field in ("content", "stderr")
    },
    **{f"CompactionBlockParam.{field}": "the summary is read as it is" for field in ("encrypted_content", "signature")},
    **{f"CodeExecutionOutputBlockParam.{field}": "programs have no files here" for field in ("file_id", "type")},
}
"""The fields that are accepted and have no effect, with the reason: none of them restricts or changes an answer."""

NOT_RUN = (
    *("AdvisorTool20260301Param", "BrowserToolset20260801Param", "ComputerToolset20260801Param", "MCPToolsetParam"),
    *("ToolSearchToolBm25_20251119Param", "ToolSearchToolRegex20251119Param"),
    *(f"WebFetchTool{version}Param" for version in ("20250910", "20260209", "20260309", "20260318")),
)
"""The tools that this server does not run."""

NOT_READ = (
    *("AdvisorToolResultBlockParam", "BashCodeExecutionToolResultBlockParam"),
    *("ContainerUploadBlockParam", "FallbackBlockParam", "MCPToolListingBlockParam", "MCPToolUseBlockParam"),
    *("RequestMCPToolResultBlockParam", "TextEditorCodeExecutionToolResultBlockParam"),
    *("ToolSearchToolResultBlockParam", "WebFetchToolResultBlockParam"),
)
"""The blocks of what only Anthropic's servers do."""

NOT_HERE: Mapping[str, str | None] = {
    **dict.fromkeys(NOT_RUN, "tools[0].type"),
    **dict.fromkeys(NOT_READ, "messages[1].content[0].type"),
    "BrowserStateBlockParam": "messages[2].content[0].content[0].type",
    **dict.fromkeys(("ClearToolUses20250919EditParam", "Compact20260112EditParam"), "context_management.edits[0].type"),
    "RequestMCPServerURLDefinitionParam": "mcp_servers",
    "SkillParams": "container.skills",
    "ThinkingBlockBindingParam": "thinking.enabled.block_binding",
    "TokenTaskBudgetParam": "output_config.task_budget",
    **dict.fromkeys(
        ("ToolChangeMCPToolReferenceParam", "ToolChangeMCPToolsetReferenceParam"),
        "messages[1].content[0].tool_changes[0].tool.type",
    ),
    **dict.fromkeys(("BillingPolicyParam", "FallbackCreditTokenParam", "FallbackParam")),
}
"""The objects that are refused with all of their fields, by their place; None for those that mean nothing here."""

DEFINED = "ToolChangeToolDefinitionParam.definition"

REFUSED: Mapping[str, str | None] = {
    "ContainerParams.id": "container",
    f"{CREATE}.inference_geo": "inference_geo",
    "ThinkingConfigAdaptiveParam.block_binding:ThinkingBlockBindingParam": "thinking.adaptive.block_binding",
    **{
        f"{tool}.allowed_callers=code_execution_{version}": "tools[0].allowed_callers"
        for tool in CODE_EXECUTION
        for version in ("20250825", "20260120", "20260521")
    },
    **{
        f"{kind.format(version)}.defer_loading=true": f"tools.0.{name}_{version}.defer_loading"
        for kind, name, versions in (
            ("WebSearchTool{}Param", "web_search", ("20250305", "20260209", "20260318")),
            ("CodeExecutionTool{}Param", "code_execution", ("20250522", "20250825", "20260120", "20260521")),
        )
        for version in versions
    },
    **{f"{DEFINED}:{tool}": "messages[1].content[0]" for tool in NOT_RUN},
    **dict.fromkeys(
        (
            *(f"ThreadContinueParams.{field}" for field in ("previous_message_id", "type")),
            f"{CREATE}.thread:ThreadContinueParams",
        ),
        "thread.previous_message_id",
    ),
    "CitationsConfigParam.enabled=true": "messages[1].content[0].citations",
    "CitationsConfigParamParam.enabled=true": "messages[1].content[0].citations",
    "ImageTransformationsParam.oversized_image=error": "messages[1].content[0].transformations.oversized_image",
    **dict.fromkeys(
        (
            *(f"FileImageSourceParam.{field}" for field in ("file_id", "type")),
            *(f"FileDocumentSourceParam.{field}" for field in ("file_id", "type")),
            *(f"URLPDFSourceParam.{field}" for field in ("url", "type")),
            *(
                "ImageBlockParam.source:FileImageSourceParam",
                "Base64ImageSourceParam.data",
                "Base64PDFSourceParam.data",
            ),
            *(
                f"{document}.source:{source}"
                for document in ("DocumentBlockParam", "RequestDocumentBlockParam")
                for source in ("FileDocumentSourceParam", "URLPDFSourceParam")
            ),
        ),
        "messages[1].content[0]",
    ),
    **{
        f"{message}.content:{block}": "messages[1].content[0].type"
        for message, blocks in (("AssistantMessageParam", ("DocumentBlockParam", "ImageBlockParam")),)
        for block in (*blocks, "RequestDocumentBlockParam", "SearchResultBlockParam")
    },
}
"""The fields and values that are refused, by their place; None for some that are taken all the same."""

VERDICTS = Verdicts(TAKEN, IDLE, NOT_HERE, REFUSED)

OWN = f"srvtoolu_{'0' * 36}"
"""The id of a call that this server ran."""
PROGRAM: Json = {"type": "server_tool_use", "id": f"{OWN}p", "name": "code_execution", "input": {"code": "x"}}
"""A program that calls tools."""

BY_FIELD: Mapping[str, Json] = {
    "model": "tiny",
    "url": "https://example.com",
    "id": OWN,
    "tool_use_id": OWN,
    "input": {"query": "x", "code": "x"},
    "container": f"container_{'0' * 36}",
    "tool_id": PROGRAM["id"],
}

BESIDE: Mapping[str, Json] = {
    "Base64ImageSourceParam": {"data": PIXEL},
    "Base64PDFSourceParam": {"data": as_base64(pdf(["x"]))},
    "CompactionBlockParam": {"content": "x"},
    "SystemMessageParam": {"content": "x"},
}

DOORS: Mapping[str, Any] = {
    "/v1/messages": (
        message_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
    ),
    "/v1/messages/count_tokens": (
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ),
}
"""The types of the bodies, also of the beta, by route."""

OF_SYSTEM = frozenset({"tool_addition", "tool_removal"})


def bodies(door: str, unknown: str = "") -> Iterator[Probe]:
    """Yield each probe of a route once; what a beta has in common with the rest stands in both."""
    done = set[str]()
    for body in DOORS[door]:
        for name, value, without in BodyTypes(body, BY_FIELD, BESIDE, {}, "messages", unknown).probes(NOT_HERE):
            probe = Probe(name, in_conversation(value), in_conversation(without))
            if probe.field.rpartition(".")[2] in (*HEADERS, "model") and "=" in name:
                continue
            if (key := f"{name} {json.dumps(probe.value, sort_keys=True)}") not in done:
                done.add(key)
                yield probe


HI: Json = {"role": "user", "content": "Hi"}
CODE = "code_execution_20260120"
TOOL: Json = {"name": "x", "input_schema": SCHEMA}


def by_assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def in_conversation(body: Json) -> Json:
    """The body of a request, with what its message and its parameters need beside them."""
    (message,) = body["messages"]
    block = message["content"][0] if isinstance(message.get("content"), list) else {"type": "text"}
    beside: Json = {}
    if block["type"] in (*OF_SYSTEM, "compaction") or "tool_choice" in body:
        beside["tools"] = [TOOL]
    if any(callers[0] != "direct" for tool in body.get("tools", ()) if (callers := tool.get("allowed_callers"))):
        body = {**body, "tools": [*body["tools"], {"type": CODE, "name": "code_execution"}]}
    before = [HI]
    if "context_management" in body:
        before *= 2
        before[1:1] = [by_assistant({"type": "thinking", "thinking": "x"}, {"type": "text", "text": "x"})] * 2
    return {**beside, **body, "messages": [*before, *around(message, block)]}


def around(message: Json, block: Json) -> list[Json]:
    """Return a message by the author of its block, with the call of a result and the result of a call."""
    call = {"id": OWN, "name": "x", "input": {}, "type": "tool_use"}
    match block["type"]:
        case "tool_result":
            return [by_assistant(call), {**message, "role": "user"}, HI]
        case "tool_use":
            result = {"type": "tool_result", "tool_use_id": block["id"]}
            return [by_assistant(PROGRAM, block), {"role": "user", "content": [result]}]
        case "server_tool_use":
            return [
                by_assistant(PROGRAM, block, {"type": "web_search_tool_result", "tool_use_id": OWN, "content": []}),
                HI,
            ]
        case "web_search_tool_result" | "code_execution_tool_result" as kind:
            name = kind.removesuffix("_tool_result")
            call = {**call, "type": "server_tool_use", "name": name, "input": BY_FIELD["input"]}
            return [by_assistant(block, call), HI]
        case "thinking" | "redacted_thinking":
            return [by_assistant(block), HI]
        case kind if kind in OF_SYSTEM:
            return [{**message, "role": "system"}, HI]
        case _:
            return [message, HI]


def request_of(door: str, body: Json) -> Json:
    """All that the server reads in a body; None if it refuses it."""
    try:
        reading = (read_prompt if door.endswith("count_tokens") else read)(json.dumps(body).encode())
    except InvalidRequest:
        return None
    return reading.request, reading.wire, reading.streams, reading.generates


def place_in(answer: Json) -> str | None:
    """The place that an error names: that of Anthropic's words, or that at its end."""
    message = str((answer.get("error") or {}).get("message", ""))
    found = re.match(r"(\S+): Extra inputs are not permitted", message) or re.search(
        r"\(at (\S+)\)$| without `(\w+)`", message
    )
    return found[found.lastindex or 0] if found else None


@pytest.mark.parametrize("door", DOORS)
async def test_server_keeps_to_the_verdict_of_every_field(tmp_path: Path, door: str) -> None:
    wrong: list[str] = []
    async with serving_everything(tmp_path, ("browser", "container", "program", "python")) as served:
        served.engine.script = script('<|channel|>final<|message|>{"a":"x"}<|return|>')
        for probe in bodies(door):
            status, answer = await served.post(probe.value, door)
            place = VERDICTS.expected(probe.name)
            if (status == 200, place_in(answer)) != (place is None, place):
                wrong.append(f"{probe.name}: {status} {answer.get('error')}")
    assert not wrong, "\n".join(wrong)


def test_every_field_of_the_sdk_has_a_verdict() -> None:
    found: dict[str, set[str]] = {}
    for body in (body for kinds in DOORS.values() for body in kinds):
        for name, fields in BodyTypes(body, BY_FIELD, BESIDE, {}, "messages").objects(NOT_HERE).items():
            found.setdefault(name, set()).update(fields)
    assert VERDICTS.fields == found


UNSEEN = frozenset({f"{CREATE}.stream"})
"""Fields that have one value in these types, which is that of a request without it."""


def test_fields_have_the_effect_of_their_verdict() -> None:
    """An optional field changes what the server reads, or is listed as without effect."""
    effects: dict[str, bool] = {}
    for door in DOORS:
        for probe in bodies(door):
            if probe.value != probe.without and ":" not in probe.name:
                changed = request_of(door, probe.value) != request_of(door, probe.without)
                effects[probe.field] = effects.get(probe.field, False) or changed
    named = {name for name in effects if name.rpartition(".")[2] not in ("type", "role")} - UNSEEN
    assert {name for name in named if not effects[name]} == named & IDLE.keys()


FREE = frozenset(
    {"InputSchemaTyped", "CodeExecutionResultBlockParam", "EncryptedCodeExecutionResultBlockParam"}
    | {"CodeExecutionToolResultErrorParam", "WebSearchResultBlockParam", "WebSearchToolRequestErrorObjectParam"}
)
"""Objects with any keys: a JSON schema, and what a server's tool returned, which is read as far as it is known."""


@pytest.mark.parametrize("door", DOORS)
def test_unknown_field_of_every_object_is_logged(door: str, caplog: pytest.LogCaptureFixture) -> None:
    silent: list[str] = []
    caplog.set_level(logging.INFO)
    for probe in bodies(door, "of_tomorrow"):
        caplog.clear()
        of_sdk, _, field = probe.field.partition(".")
        if of_sdk not in TAKEN.keys() - FREE or field in HEADERS or VERDICTS.expected(probe.name):
            continue
        is_taken = request_of(door, probe.value) is not None
        is_logged = any("Ignored unknown parameters" in line for line in caplog.messages)
        if is_taken and is_logged != (field == "of_tomorrow"):
            silent.append(f"{probe.name}: {caplog.messages}")
    assert not silent, "\n".join(silent)


def test_mark_of_claude_code_on_a_result_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No SDK has ``safeguards``: it is about a classifier of Anthropic's, and stands on results of a whole session."""
    caplog.set_level(logging.INFO)
    result = {"type": "tool_result", "tool_use_id": OWN, "content": "x", "safeguards": [{"type": "dangerous_tool_use"}]}
    call = {"type": "tool_use", "id": OWN, "name": "x", "input": {}}
    messages = [HI, by_assistant(call), {"role": "user", "content": [result]}]
    assert request_of("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": messages}) is not None
    assert caplog.messages == []
