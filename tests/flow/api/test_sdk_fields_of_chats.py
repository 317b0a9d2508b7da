"""The verdict of each field of a chat's body, as openai-python's types have it, and that the server keeps to it.

A new version of the SDK with fields that stand in no table here fails.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from penstock.extensions.dialects.chat.dialect import read
from penstock.pipeline.errors import InvalidRequest
from tests.support.chat_streams import chunks_of
from tests.support.sdk_types import IMAGE, BodyTypes, Probe, Verdicts
from tests.support.server import ScriptedServer, script
from tests.support.tool_servers import serving_everything

Json: TypeAlias = Any

CHAT = "/v1/chat/completions"
CREATE = "CompletionCreateParamsNonStreaming"
"""The type of the body."""

PROMPTED = ("ChatCompletionDeveloperMessageParam", "ChatCompletionSystemMessageParam", "ChatCompletionUserMessageParam")

TAKEN: Mapping[str, str] = {
    CREATE: "audio frequency_penalty functions logit_bias logprobs max_completion_tokens max_tokens messages metadata"
    " model moderation n parallel_tool_calls presence_penalty prompt_cache_key prompt_cache_options"
    " prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream"
    " stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options",
    "ChatCompletionAllowedToolChoiceParam": "allowed_tools type",
    "ChatCompletionAllowedToolsParam": "mode tools",
    "ChatCompletionAssistantMessageParam": "audio content function_call refusal role tool_calls",
    "ChatCompletionContentPartImageParam": "image_url type",
    "ChatCompletionContentPartRefusalParam": "refusal type",
    "ChatCompletionContentPartTextParam": "text type",
    "ChatCompletionCustomToolParam": "custom type",
    "ChatCompletionFunctionToolParam": "function type",
    "ChatCompletionMessageCustomToolCallParam": "custom id type",
    "ChatCompletionMessageFunctionToolCallParam": "function id type",
    "ChatCompletionNamedToolChoiceCustomParam": "custom type",
    "ChatCompletionNamedToolChoiceParam": "function type",
    "ChatCompletionStreamOptionsParam": "include_obfuscation include_usage",
    "ChatCompletionToolMessageParam": "content role tool_call_id",
    **dict.fromkeys(PROMPTED, "content role"),
    "Custom": "description format input name",
    "CustomFormatGrammar": "grammar type",
    "CustomFormatGrammarGrammar": "definition syntax",
    "CustomFormatText": "type",
    "File": "file type",
    "FileFile": "file_data file_id filename",
    "Function": "arguments description name parameters",
    "FunctionDefinition": "description name parameters strict",
    "ImageURL": "detail url",
    "JSONSchema": "description name schema strict",
    "PromptCacheOptions": "mode ttl",
    "ResponseFormatJSONObject": "type",
    "ResponseFormatJSONSchema": "json_schema type",
    "ResponseFormatText": "type",
    "WebSearchOptions": "search_context_size user_location",
    "WebSearchOptionsUserLocation": "approximate type",
    "WebSearchOptionsUserLocationApproximate": "city country region timezone",
}
"""The fields that have an effect, are part of what the model or the client reads, or are refused."""

_NAMED = "models read no names of authors"
_BREAKPOINT = "the engine caches each prefix of a prompt"
_FUNCTIONS = "it restricts `functions`, which are refused, and 'none' and 'auto' restrict nothing without them"

IDLE: Mapping[str, str] = {
    **{f"{message}.name": _NAMED for message in (*PROMPTED, "ChatCompletionAssistantMessageParam")},
    **{f"ChatCompletionContentPart{part}Param.prompt_cache_breakpoint": _BREAKPOINT for part in ("Image", "Text")},
    "File.prompt_cache_breakpoint": _BREAKPOINT,
    **{
        f"{kind}.{field}": _BREAKPOINT
        for kind in ("FilePromptCacheBreakpoint", "PromptCacheBreakpoint")
        for field in ("mode", "ttl")
    },
    f"{CREATE}.function_call": _FUNCTIONS,
    f"{CREATE}.modalities": "models write text, and other kinds are refused",
    f"{CREATE}.prediction": "a prediction makes an answer faster at OpenAI, and no other",
}
"""The fields that are accepted and have no effect, with the reason: none of them restricts or changes an answer."""

NOT_HERE: Mapping[str, str | None] = {
    "Audio": "messages[0].audio",
    "ChatCompletionAudioParam": "audio",
    "ChatCompletionContentPartInputAudioParam": "messages[0].content[0]",
    "ChatCompletionFunctionCallOptionParam": "function_call",
    "ChatCompletionFunctionMessageParam": "messages[0].role",
    "ChatCompletionPredictionContentParam": None,
    "FunctionCall": "messages[0].function_call",
    "Moderation": "moderation",
}
"""The objects that are refused with all of their fields, by their place; None for one that is taken with any field."""

REFUSED: Mapping[str, str | None] = {
    "FileFile.file_id": "messages[0].content[0].file_id",
    f"{CREATE}.modalities=audio": "modalities",
}
"""The values that are refused, by their place: the server has no file of that id."""

VERDICTS = Verdicts(TAKEN, IDLE, NOT_HERE, REFUSED)

TYPES = BodyTypes(
    CompletionCreateParamsNonStreaming,
    by_field={
        "model": "tiny",
        "url": IMAGE,
        "definition": "start: /a+/",
        "file_data": "YQ==",
        "logit_bias": {"5": 1},
        "n": 2,
    },
    beside={"ChatCompletionAssistantMessageParam": {"content": "x"}, "FileFile": {"file_data": "YQ=="}},
    dictionaries={"tools": {"type": "function", "function": {"name": "x"}}},
    last="messages",
)


def bodies(unknown: str = "") -> Iterator[Probe]:
    """Yield each probe; models of OpenAI's are none of this server."""
    for name, value, without in BodyTypes(**{**vars(TYPES), "unknown": unknown}).probes(NOT_HERE):
        if not name.startswith(f"{CREATE}.model="):
            yield Probe(name, in_conversation(value), in_conversation(without))


FUNCTION: Json = {"type": "function", "function": {"name": "x"}}
CUSTOM: Json = {"type": "custom", "custom": {"name": "x"}}


def in_conversation(body: Json) -> Json:
    """The body of a request, with what its message and its parameters need beside them."""
    beside: Json = {}
    if "tool_choice" in body:
        is_custom = isinstance(body["tool_choice"], dict) and body["tool_choice"]["type"] == "custom"
        beside["tools"] = [CUSTOM if is_custom else FUNCTION]
    if "top_logprobs" in body:
        beside["logprobs"] = True
    if "stream_options" in body:
        beside["stream"] = True
    (message,) = body["messages"]
    return {**beside, **body, "messages": around(message)}


def around(message: Json) -> list[Json]:
    """Return a message with the call of an output or the output of a call; a file has one source."""
    match message:
        case {"role": "tool", "tool_call_id": call_id}:
            call = {"type": "function", "id": call_id, "function": {"name": "x", "arguments": "{}"}}
            return [{"role": "assistant", "tool_calls": [call]}, message]
        case {"tool_calls": [{"id": call_id}]}:
            return [message, {"role": "tool", "tool_call_id": call_id, "content": "x"}]
        case {"content": [{"file": {"file_id": _, "file_data": _, **others}, **part}]}:
            return [{**message, "content": [{**part, "file": {**others, "file_id": "file-x"}}]}]
        case _:
            return [message]


def request_of(body: Json) -> Json:
    """All that the server reads in a body; None if it refuses it."""
    try:
        reading = read(json.dumps(body).encode())
    except InvalidRequest:
        return None
    return reading.request, reading.others, reading.wire, reading.streams


def expected(probe: Probe) -> str | None:
    """The place of the error for a probe; the type of ``functions`` has the name of others."""
    return "functions" if "functions" in probe.value else VERDICTS.expected(probe.name)


async def place_of_error(served: ScriptedServer, body: Json) -> tuple[bool, str | None]:
    """Return True and None if a chat is answered, else False and the place that the error names."""
    if body.get("stream"):
        return bool(chunks_of(await served.stream(body, CHAT))), None
    status, answer = await served.post(body, CHAT)
    return status == 200, (answer.get("error") or {}).get("param")


async def test_server_keeps_to_the_verdict_of_every_field(tmp_path: Path) -> None:
    wrong: list[str] = []
    async with serving_everything(tmp_path) as served:
        served.engine.script = script('<|channel|>final<|message|>{"a":"x"}<|return|>')
        for probe in bodies():
            is_answered, place = await place_of_error(served, probe.value)
            if (is_answered, place) != (expected(probe) is None, expected(probe)):
                wrong.append(f"{probe.name}: {place}, not {expected(probe)}")
    assert not wrong, "\n".join(wrong)


def test_every_field_of_the_sdk_has_a_verdict() -> None:
    assert VERDICTS.fields == TYPES.objects(NOT_HERE)


def test_fields_have_the_effect_of_their_verdict() -> None:
    """An optional field changes what the server reads, or is listed as without effect."""
    effects: dict[str, bool] = {}
    for probe in bodies():
        if probe.value != probe.without and ":" not in probe.name and expected(probe) is None:
            changed = request_of(probe.value) != request_of(probe.without)
            effects[probe.field] = effects.get(probe.field, False) or changed
    assert {name for name, has_effect in effects.items() if not has_effect} == effects.keys() & IDLE.keys()


def test_unknown_field_of_every_object_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    silent: list[str] = []
    caplog.set_level(logging.INFO)
    for probe in bodies("of_tomorrow"):
        caplog.clear()
        of_sdk, _, field = probe.field.partition(".")
        if of_sdk not in TAKEN or expected(probe) or request_of(probe.value) is None:
            continue
        is_logged = any("Ignored unknown parameters" in line for line in caplog.messages)
        if is_logged != (field == "of_tomorrow"):
            silent.append(f"{probe.name}: {caplog.messages}")
    assert not silent, "\n".join(silent)


THOUGHT: Json = {"type": "thinking", "thinking": "x", "signature": "x"}
CALLED: Json = {**FUNCTION, "id": "x", "index": 0, "function": {"name": "x", "arguments": "{}"}}
SENT_BACK: list[Json] = [
    {"role": "assistant", "content": "x", "annotations": []},
    {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "x"}]},
    {"role": "assistant", "tool_calls": [CALLED]},
    {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE, "detail": "low"}]},
]
"""Messages with keys that no type of a request has: those of answers, and of parts of other APIs."""


@pytest.mark.parametrize("message", SENT_BACK, ids=["annotations", "thoughts", "index", "detail"])
def test_keys_that_clients_send_back_are_not_logged(message: Json, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert request_of({"model": "tiny", "messages": around(message)}) is not None
    assert caplog.messages == []
