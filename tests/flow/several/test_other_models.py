"""Conversations that go on with another model: texts are used, and tokens only by the model that generated them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.start import backends
from penstock.pipeline.protocol import items
from penstock.services.engines.scripted import Script
from penstock.stages.models.chat.load import ChatOptions
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.standalone import ModelFiles, load_from_files
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import Json
from tests.support.paths import TINY_QWEN
from tests.support.sdk_types import IMAGE
from tests.support.server import PacedEngine
from tests.support.several import SeveralServer, several_models
from tests.support.stored_responses import ITEMS, store_response, stored_response

THOUGHT = "Ponder deeply"
ASKED: Json = {"role": "user", "content": "Hi"}
TOOL: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}
OUTPUT = "It rains."


@cache
def qwen_model() -> ChatModel:
    return load_from_files(ModelFiles(str(TINY_QWEN)), ChatOptions())


def qwen_encoded(text: str) -> tuple[int, ...]:
    return tuple(qwen_model().vocabulary.encode(text))


def qwen_letters(text: str) -> tuple[int, ...]:
    return tuple(token for letter in text for token in qwen_encoded(letter))


def harmony_letters(text: str) -> tuple[int, ...]:
    return tuple(token for letter in text for token in load_encoding().encode(letter))


def oss() -> PacedEngine:
    """An engine of gpt-oss whose thoughts are in tokens that no encoder would choose; it calls a function."""
    rest = "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
    encode = load_encoding().encode_markup
    thought = (*encode("<|channel|>analysis<|message|>"), *harmony_letters(THOUGHT), *encode("<|end|>"))
    return PacedEngine(Script((*thought, *encode(rest))), models=("upstream",))


def qwen() -> PacedEngine:
    """The same of a model with a chat template."""
    called = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    thought = (*qwen_encoded("<think>"), *qwen_letters(f"\n{THOUGHT}\n"), *qwen_encoded("</think>"))
    tokens = (*thought, *qwen_encoded(f"\n\n{called}"))
    return PacedEngine(Script(tokens), models=("upstream",), vocabulary_size=2048)


MADE: dict[str, tuple[Callable[[], PacedEngine], Callable[[str], Sequence[int]]]] = {
    "oss": (oss, harmony_letters),
    "twin": (oss, harmony_letters),
    "qwen": (qwen, qwen_letters),
}
"""The models, and the tokens in which they write a thought."""

TABLES: Json = {"qwen": {"model": str(TINY_QWEN)}, "oss": {"names": ["gpt"]}}


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[SeveralServer, None]:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)  # as where vLLM is not installed
    async with several_models(tmp_path, {name: make() for name, (make, _) in MADE.items()}, TABLES) as served:
        yield served


def occurrences(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    return sum(tuple(prompt[at : at + len(tokens)]) == tuple(tokens) for at in range(len(prompt)))


def text_of_prompt(served: SeveralServer, model: str) -> str:
    tokens = served.engines[model].prompts[-1].token_ids
    return qwen_model().vocabulary.decode(tokens) if model == "qwen" else load_encoding().decode(tokens)


def output_of(response: Json) -> Json:
    return {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": OUTPUT}


async def respond(served: SeveralServer, model: str, **body: Any) -> Json:
    status, answer = await served.post({"model": model, "tools": [TOOL], **body})
    assert status == 200, answer
    assert answer["status"] == "completed", answer["error"]
    return dict(answer)


async def by_previous_response(served: SeveralServer, models: Sequence[str]) -> None:
    answer = await respond(served, models[0], input=[ASKED])
    for model in models[1:]:
        answer = await respond(served, model, input=[output_of(answer)], previous_response_id=answer["id"])


async def by_conversation(served: SeveralServer, models: Sequence[str]) -> None:
    path = await served.create_conversation()
    conversation = path.rpartition("/")[2]
    answer = await respond(served, models[0], input=[ASKED], conversation=conversation)
    for model in models[1:]:
        answer = await respond(served, model, input=[output_of(answer)], conversation=conversation)


async def by_sealed_thoughts(served: SeveralServer, models: Sequence[str]) -> None:
    sent: list[Json] = [ASKED]
    for model in models:
        answer = await respond(served, model, input=sent, store=False, include=["reasoning.encrypted_content"])
        thought, call = answer["output"]
        sent += [{**thought, "content": None}, call, output_of(answer)]


async def by_signed_thoughts(served: SeveralServer, models: Sequence[str]) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    sent: list[Json] = [ASKED]
    for model in models:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"model": model, "messages": sent, "max_tokens": 2000, "tools": [tool], "thinking": thinking}
        status, answer = await served.post(body, "/v1/messages")
        assert (status, answer["stop_reason"]) == (200, "tool_use"), answer
        result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": OUTPUT}
        sent += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


async def over_a_socket(served: SeveralServer, models: Sequence[str]) -> None:
    async with served.client.ws_connect(f"{served.url}/v1/responses") as socket:
        body: Json = {"input": [ASKED]}
        for model in models:
            await socket.send_json({"type": "response.create", "model": model, "tools": [TOOL], "store": False, **body})
            event: Json = {"type": ""}
            while event["type"] != "response.completed":
                event = json.loads((await socket.receive()).data)
                assert event["type"] not in ("error", "response.failed"), event
            answer = event["response"]
            body = {"input": [output_of(answer)], "previous_response_id": answer["id"]}


DOORS: dict[str, Callable[[SeveralServer, Sequence[str]], Awaitable[None]]] = {
    "previous response": by_previous_response,
    "conversation": by_conversation,
    "sealed thoughts": by_sealed_thoughts,
    "signed thoughts": by_signed_thoughts,
    "socket": over_a_socket,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "models",
    [("oss", "oss"), ("qwen", "qwen"), ("oss", "gpt"), ("oss", "twin"), ("oss", "qwen"), ("qwen", "oss")],
    ids=" to ".join,
)
async def test_texts_are_read_by_all_models_and_tokens_by_their_writer(
    served: SeveralServer, door: str, models: tuple[str, str]
) -> None:
    await DOORS[door](served, models)
    first, second = ("oss" if model == "gpt" else model for model in models)
    _, spelled = MADE[first]
    tokens = spelled(THOUGHT)
    prompt = served.engines[second].prompts[-1]
    assert occurrences(prompt.token_ids, tokens) == (first == second)
    assert THOUGHT in (text := text_of_prompt(served, second))
    assert OUTPUT in text


@pytest.mark.parametrize("door", DOORS)
async def test_the_first_model_finds_its_tokens_again(served: SeveralServer, door: str) -> None:
    await DOORS[door](served, ("oss", "qwen", "twin", "oss"))
    prompt = served.engines["oss"].prompts[-1].token_ids
    assert occurrences(prompt, harmony_letters(THOUGHT)) == 1
    assert text_of_prompt(served, "oss").count(THOUGHT) == 3


# What a model cannot have written itself


def call_of(item: items.Item) -> str | None:
    return getattr(item, "call_id", None)


USER = items.Message("msg_0", "completed", "user", (items.InputText("Hi"),))
ALL: tuple[items.Item, ...] = (
    *ITEMS,
    items.Message("msg_5", "completed", "user", (items.InputImage(IMAGE),)),
    items.FunctionCallOutput("fco_4", "call_2", "sunny", "completed"),
    items.FunctionCall("fc_3", "call_9", "look", "{}", "completed"),
    items.FunctionCallOutput("fco_3", "call_9", (items.InputImage(IMAGE),), "completed"),
    items.ComputerCall("cu_1", "call_10", "completed", actions=({"type": "click", "x": 1, "y": 2, "button": "left"},)),
    items.ComputerCallOutput("cuo_1", "call_10", items.Screenshot(IMAGE), "completed"),
    items.ToolSearchCall("tsc_1", "call_11", {"query": "maps"}, "completed", "client"),
    items.ToolSearchOutput("tso_1", "call_11", (TOOL,), "completed", "client"),
    items.FileSearchCall("fs_1", ("snakes",), "completed"),
    items.ImageGenerationCall("ig_1", "completed"),
    items.Program("prog_1", "call_12", "look()", "f"),
    items.ProgramOutput("progo_1", "call_12", "7", "completed"),
    items.ConfigurationUpdate("cfg_1", reasoning={"effort": "low"}),
)
GROUPS = {
    item.id or "": tuple(each for each in ALL if each is item or (call_of(item) and call_of(each) == call_of(item)))
    for item in ALL
}
"""Items of all kinds by the id of each, with the calls of outputs and the outputs of calls."""

FOREIGN = (2**31 - 1, 200_008, 3)
"""Tokens of no vocabulary, with the mark of Harmony's at which a message begins."""


@pytest.mark.parametrize("model", ["oss", "qwen"])
@pytest.mark.parametrize("name", GROUPS)
async def test_each_kind_of_item_of_another_model_is_rendered(served: SeveralServer, name: str, model: str) -> None:
    given = (USER, *GROUPS[name])
    stored = stored_response("resp_a", *given, status="completed", model="twin")
    tokens = {item.id: FOREIGN for item in given if item.id}
    await store_response(served.scheduler.store, msgspec.structs.replace(stored, tokens=tokens, writer="twin"))
    await respond(served, model, input="And?", previous_response_id="resp_a")
    assert not occurrences(served.engines[model].prompts[-1].token_ids, FOREIGN[:1])


# Summaries


@pytest.mark.parametrize(("model", "writer"), [("oss", "qwen"), ("qwen", "oss"), ("oss", "twin")], ids=str)
@pytest.mark.parametrize("door", ["at once", "when it is long"])
async def test_another_model_writes_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, model: str, writer: str
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    engines = {name: make() for name, (make, _) in MADE.items()}
    summary = "They greeted."
    engines[writer].script = Script(
        qwen_encoded(f"<think>\nHm\n</think>\n\n{summary}<|im_end|>")
        if writer == "qwen"
        else load_encoding().encode_markup(f"<|channel|>final<|message|>{summary}<|return|>")
    )
    tables = {**TABLES, model: {**TABLES.get(model, {}), "summaries": writer}}
    folder = tmp_path / "recordings"
    async with several_models(tmp_path, engines, tables, record=folder) as served:
        if door == "at once":
            status, made = await served.post({"model": model, "input": [ASKED]}, "/v1/responses/compact")
            assert status == 200
            answer = await respond(served, model, input=[*made["output"], {"role": "user", "content": "And?"}])
        else:
            management = [{"type": "compaction", "compact_threshold": 1000}]
            long: Json = {"role": "user", "content": "Hi " * 2000}
            given = [long, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
            answer = await respond(served, model, input=given, context_management=management)
            assert answer["output"][0]["type"] == "compaction"
            made = answer
        stored = await served.scheduler.store.get(answer["id"], "")
        assert stored is not None
        assert stored.writer == model
        assert answer["model"] == model
        prompts = [len(each.prompts) for each in (engines[writer], engines[model])]
        assert prompts == [1, 1] or door != "at once"
        assert "Write a summary of the conversation" in text_of_prompt(served, writer)
        assert summary in text_of_prompt(served, model)
        assert made["usage"]["input_tokens"] >= len(engines[writer].prompts[0].token_ids)
        assert made["usage"]["output_tokens"] >= len(engines[writer].script.token_ids)
