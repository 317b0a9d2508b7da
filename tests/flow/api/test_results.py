from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ResolvedRequest, with_facts
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import Toolset
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.tools import Toolbox, ToolResult
from penstock.stages.converse.converse import Converse
from tests.support.api_clients import wait_until
from tests.support.scripted_tools import ScriptedTool
from tests.support.server import CALL, WEATHER, ScriptedServer, running_server, script

CODE = "<|channel|>analysis to=python code<|message|>6 * 7<|call|>"
RESULT = "The result is 42 🐍."


@dataclass
class Last(ScriptedTool):
    """A tool; after its call, the model calls one of the client's functions."""

    engine: ScriptedEngine | None = None

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        assert self.engine
        self.engine.script = script(CALL)
        return await super().run(name, text, seconds)


async def python(source: AsyncIterator[ResolvedRequest]) -> AsyncGenerator[ResolvedRequest, None]:
    async for conversation in source:
        yield with_facts(conversation, tools=Toolset((*conversation.facts.tools.tools, *kinds()["python"].tools)))


@pytest.fixture
async def calculating(store_at: str) -> AsyncIterator[ScriptedServer]:
    """A server whose model calculates something, and then asks for the weather."""
    engine = ScriptedEngine(script(CODE))
    tool = Last((ToolResult(RESULT),), engine=engine)

    def edit(whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        converse = Converse(whole.inner("converse"), Toolbox({"python": tool}))
        return whole.replace("converse", converse).insert_after("normalize", "python", python)

    async with running_server(engine, store_at, edit=edit) as served:
        yield served


@pytest.mark.parametrize(
    ("through", "way"),
    list(product(("previous_response_id", "conversation"), ({}, {"stream": True}, {"background": True}))),
    ids=str,
)
async def test_hidden_result_is_read_in_every_continuation(
    calculating: ScriptedServer, through: str, way: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"input": "What to wear?", "tools": [WEATHER], **way}
    if through == "conversation":
        body["conversation"] = (await calculating.post({}, "/v1/conversations"))[1]["id"]
    async with calculating.client.post(f"{calculating.url}/v1/responses", json=body) as answer:
        body_text = await answer.text()
    assert (answer.status, RESULT in body_text) == (200, False)
    await wait_until(lambda: len(calculating.engine.prompts) == 2 and len(calculating.scheduler.runs) == 0)
    response_id = calculating.engine.prompts[0].facts.response.id
    past = {"conversation": body["conversation"]} if "conversation" in body else {"previous_response_id": response_id}
    (call_id,) = set(re.findall(r"call_[0-9a-f]{36}", await shown(calculating, response_id, body_text)))
    output = {"type": "function_call_output", "call_id": call_id, "output": "Rain."}
    assert (await calculating.post({"input": [output], "tools": [WEATHER], **past}))[0] == 200
    read = calculating.prompt_text()
    assert read.index("6 * 7") < read.index(RESULT) < read.index("Paris") < read.index("Rain.")


async def test_replayed_call_has_its_result(calculating: ScriptedServer) -> None:
    """A client that sends the items itself need not send hidden results."""
    body: dict[str, Any] = {"input": "What to wear?", "tools": [WEATHER]}
    _, first = await calculating.post(body)
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Rain."}
    question = {"role": "user", "content": body["input"]}
    assert (await calculating.post({"input": [question, *first["output"], output], "tools": [WEATHER]}))[0] == 200
    read = calculating.prompt_text()
    assert read.index("6 * 7") < read.index(RESULT) < read.index("Paris") < read.index("Rain.")


async def test_sealed_thought_has_the_hidden_results_before_it(calculating: ScriptedServer) -> None:
    """The store has none of them, and the items do not show them."""
    body: dict[str, Any] = {"tools": [WEATHER], "store": False}
    question = {"role": "user", "content": "What to wear?"}
    _, first = await calculating.post({"input": [question], **body})
    assert [item["type"] for item in first["output"]] == ["code_interpreter_call", "reasoning", "function_call"]
    assert RESULT not in str(first)
    tokens = calculating.engine.prompts[-1].token_ids
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "Rain."}
    assert (await calculating.post({"input": [question, *first["output"], output], **body}))[0] == 200
    read = calculating.prompt_text()
    assert read.index("6 * 7") < read.index(RESULT) < read.index("Paris") < read.index("Rain.")
    assert calculating.engine.prompts[-1].token_ids[: len(tokens)] == tokens


async def shown(served: ScriptedServer, response_id: str, body_text: str) -> str:
    """All that a client can learn of a response: its answer, and its stored copy."""
    return body_text + str((await served.get(f"/v1/responses/{response_id}"))[1])
