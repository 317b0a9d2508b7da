"""The dialect of the Messages API keeps the rules of dialects."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.extensions.dialects.messages.dialect import MESSAGES
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import Reasoning
from penstock.pipeline.protocol.params.request import OUTPUTS, CreateResponse
from penstock.testing import check_dialect
from tests.support.messages import heard
from tests.support.paths import CHAT, HARMONY

RECORDINGS = [HARMONY / "greeting", HARMONY / "function_call", *sorted(CHAT.glob("*/"))[:3]]


async def test_it_keeps_all_rules() -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    omitted = {"type": "adaptive", "display": "omitted"}
    bodies = [body, {**body, "stream": True, "thinking": omitted}, {**body, "thinking": {"type": "disabled"}}]
    await check_dialect(MESSAGES, [json.dumps(body).encode() for body in bodies], heard, RECORDINGS)


USER = {"role": "user", "content": "Hi"}


def asked(**fields: Any) -> CreateResponse:
    body = {"model": "tiny", "max_tokens": 1, "messages": [USER], **fields}
    return MESSAGES.read(json.dumps(body).encode()).request


def thoughts(**fields: Any) -> list[str]:
    turns: list[Any] = []
    for text in ("one", "two", "three"):
        turns += [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": ""}]}]
    items = asked(messages=[*turns, USER], **fields).input_items
    return [item.content[0].text for item in items if isinstance(item, Reasoning) and item.content]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, ["three"]),
        ({"keep": "all"}, ["one", "two", "three"]),
        ({"keep": {"type": "all"}}, ["one", "two", "three"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ["two", "three"]),
        ({"keep": {"type": "thinking_turns", "value": 9}}, ["one", "two", "three"]),
    ],
)
def test_earlier_thoughts_may_be_cleared(keep: dict[str, Any], left: list[str]) -> None:
    assert thoughts(context_management={"edits": [{"type": "clear_thinking_20251015", **keep}]}) == left
    assert thoughts() == thoughts(context_management={"edits": []}) == ["one", "two", "three"]


def test_programs_run_in_the_code_interpreter() -> None:
    request = asked(tools=[{"type": "code_execution_20250825", "name": "code_execution"}])
    assert request.tools is not None
    assert [tool.type for tool in request.tools] == ["code_interpreter"]
    assert request.include == [OUTPUTS]


def test_examples_of_input_are_for_the_model() -> None:
    request = asked(tools=[{**TOOL, "description": "Adds.", "input_examples": [{"a": 1}, {"a": 2}]}])
    assert request.tools is not None
    assert request.tools[0].model_dump()["description"] == 'Adds.\nExamples of input:\n{"a": 1}\n{"a": 2}'


TOOL: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}, "allowed_callers": ["direct"]}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (DOCUMENT["source"], '<file name="T">\nx\n</file>\n'),
        ({"type": "content", "content": "</file>"}, '<file-TAG name="T">\n</file>\n</file-TAG>\n'),
        (
            {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            '<file name="T">\na\nb\n</file>\n',
        ),
        (
            {"type": "content", "content": [{"type": "text", "text": "</fi"}, {"type": "text", "text": "le>"}]},
            '<file-TAG name="T">\n</fi\nle>\n</file-TAG>\n',
        ),
    ],
)
def test_document_stands_between_marks_with_its_title(source: Any, text: str) -> None:
    block = {"type": "document", "title": "T", "context": "C", "source": source}
    message: Any = asked(messages=[{"role": "user", "content": [block]}]).input_items[0]
    assert [re.sub("file-[0-9a-f]{32}", "file-TAG", part.text) for part in message.content] == [f"C\n{text}"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"container": {"id": "x"}}, "container"),
        ({"inference_geo": "moon"}, "inference_geo"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"guided_regex": "a+"}, "guided_regex"),
        (
            {"messages": [{"role": "user", "content": [{**DOCUMENT, "citations": {"enabled": True}}]}]},
            "messages[0].content[0].citations",
        ),
        ({"thread": "create"}, "thread"),
        ({"thread": {}}, "thread.type"),
        ({"thread": {"type": "fork"}}, "thread.type"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        ({"thread": {"type": "continue", "previous_message_id": 5}}, "thread.previous_message_id"),
        ({"compaction": "summarize"}, "compaction"),
        ({"compaction": {}}, "compaction.type"),
        ({"compaction": {"type": "summarize", "instructions": 5}}, "compaction.instructions"),
    ],
)
def test_what_would_be_ignored_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    assert error.value.param == param
