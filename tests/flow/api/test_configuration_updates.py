"""``configuration_update``: the effort and the format of a conversation from a point on, however it goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.services.engines.scripted import Script, ScriptedEngine
from tests.support.chat_families import load_model
from tests.support.server import ScriptedServer, running_server, script

Json = dict[str, Any]

SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT: Json = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
HIGH: Any = {"type": "configuration_update", "reasoning": {"effort": "high"}}
LOW: Any = {"type": "configuration_update", "reasoning": {"effort": "low"}}
TYPED: Any = {"type": "configuration_update", "text": {"format": FORMAT}}
PLAIN: Any = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
HI: Any = {"role": "user", "content": "Hi"}
JSON = '<|channel|>final<|message|>{"a":"b"}<|return|>'


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(JSON), models=("tiny",)), tmp_path) as served:
        yield served


def efforts(served: ScriptedServer) -> str:
    """The effort of the last prompt."""
    return served.prompt_text().split("Reasoning: ")[1].split("\n")[0]


def is_typed(served: ScriptedServer) -> bool:
    return "# Response Formats" in served.prompt_text()


async def test_update_lasts_until_the_next_one(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    """The response repeats the effort of the request, which is that of the conversation's beginning."""
    first = await sdk.responses.create(model="tiny", input=[HIGH, TYPED, HI], reasoning={"effort": "low"})
    assert (efforts(served), is_typed(served)) == ("high", True)
    assert first.reasoning
    assert (first.reasoning.effort, first.text and first.text.format and first.text.format.type) == ("low", "text")
    later: Any = {"model": "tiny", "previous_response_id": first.id}
    await sdk.responses.create(**later, input="And now?", reasoning={"effort": "medium"})
    assert (efforts(served), is_typed(served)) == ("high", True)
    plain: Any = {**PLAIN, "id": "cu_mine"}
    await sdk.responses.create(**later, input=[plain, LOW, HI])
    assert (efforts(served), is_typed(served)) == ("low", False)
    reset: Any = {"type": "configuration_update", "reasoning": {"effort": None}}
    await sdk.responses.create(**later, input=[reset, HI], reasoning={"effort": "low"})
    assert efforts(served) == "medium"


async def test_update_is_kept_listed_and_referred_to(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    message: Any = {"type": "message", **HI}
    conversation = await sdk.conversations.create(items=[HIGH, message])
    items = await sdk.conversations.items.list(conversation.id, order="asc")
    kept = items.data[0].to_dict()
    assert kept == {**HIGH, "id": kept["id"]}
    assert str(kept["id"]).startswith("cu_")
    await sdk.responses.create(model="tiny", input=[TYPED, HI], conversation=conversation.id)
    await sdk.responses.create(model="tiny", input="And now?", conversation=conversation.id)
    assert (efforts(served), is_typed(served)) == ("high", True)
    reference: Any = {"type": "item_reference", "id": kept["id"]}
    await sdk.responses.create(model="tiny", input=[reference, HI])
    assert efforts(served) == "high"


async def test_update_outlives_a_compaction(served: ScriptedServer) -> None:
    served.engine.script = script("<|channel|>final<|message|>They met.<|return|>")
    sent = [HIGH, TYPED, HI, {"role": "assistant", "content": "Hello!"}]
    status, compacted = await served.post({"model": "tiny", "input": sent}, "/v1/responses/compact")
    assert (status, efforts(served), is_typed(served)) == (200, "low", False)  # a summary has its own
    served.engine.script = script(JSON)
    await served.post({"input": [*compacted["output"], HI]})
    assert (efforts(served), is_typed(served)) == ("high", True)


@pytest.mark.vllm
async def test_model_with_a_template_reads_updates(tmp_path: Path) -> None:
    model = load_model()
    engine = ScriptedEngine(Script(model.vocabulary.encode('{"a":"b"}<|im_end|>')))
    none: Any = {"type": "configuration_update", "reasoning": {"effort": "none"}}
    async with running_server(engine, tmp_path, model=model) as served:
        seen = [[], [HIGH], [none, TYPED]]
        for updates in seen:
            status, answer = await served.post({"input": [*updates, HI]})
            assert (status, answer["status"]) == (200, "completed")
    variables = [prompt.chat.variables for prompt in engine.prompts if prompt.chat]
    assert [each.get("reasoning_effort") for each in variables] == [None, "high", "none"]
    assert [prompt.grammar is not None for prompt in engine.prompts] == [False, False, True]


@pytest.mark.parametrize(
    ("update", "param"),
    [
        ({}, "input[0]"),
        ({"reasoning": {"effort": "huge"}}, "input[0].reasoning.effort"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "input[0].reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "input[0].text.format"),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, "input[0].text.verbosity"),
        ({"text": {"format": {"type": "json_object"}}}, "input[0].text.format.type"),
        ({"reasoning": {"effort": "low"}, "tools": []}, "input[0].tools"),
        ({"reasoning": {"effort": "low"}, "temperature": 1}, "input[0].temperature"),
    ],
)
async def test_what_cannot_be_changed_is_refused_by_name(served: ScriptedServer, update: Json, param: str) -> None:
    status, answer = await served.post({"input": [{"type": "configuration_update", **update}, HI]})
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [TYPED, HI], "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"input": [TYPED, HI, {"role": "assistant", "content": "It", "status": "incomplete"}]}, "input"),
    ],
)
async def test_format_of_an_update_excludes_what_that_of_a_request_does(
    served: ScriptedServer, body: Json, param: str
) -> None:
    status, answer = await served.post(body)
    assert (status, answer["error"]["param"]) == (400, param)
    status, _ = await served.post({**body, "input": [TYPED, PLAIN, *body["input"][1:]]})
    assert status == 200
