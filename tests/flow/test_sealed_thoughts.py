"""Sealed thoughts: a conversation that its client keeps goes on with the same prompts as one that the store keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import Prompt
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.sealing import Sealer
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import ModelStages, chat_stages, harmony_stages, responses_pipeline, sealing
from tests.support.chat_families import family_model
from tests.support.event_streams import final, run_request
from tests.support.examples import examples
from tests.support.harmony import encode_by_letters
from tests.support.paths import TINY_QWEN
from tests.support.stores import open_store

Json = dict[str, Any]

KEY = b"0123456789abcdef"
TOOL: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@dataclass(frozen=True)
class Turn:
    """A turn of the model, and the reaction of the client: an output if the model makes a call, else a message."""

    thought: str
    text: str
    calls: bool
    reaction: str


_texts = st.text(st.sampled_from("ab cé\n<>{}👩."), min_size=1, max_size=12).map(lambda text: f"x{text}x")
_turns = st.lists(st.builds(Turn, _texts, _texts, st.booleans(), _texts), min_size=1, max_size=4)


def _harmony_tokens(turn: Turn) -> Sequence[int]:
    """A thought in tokens that no encoder would choose, and then the rest as it is rendered."""
    encode = load_encoding().encode_markup
    called = f" to=functions.look<|channel|>commentary json<|message|>{_arguments(turn)}<|call|>"
    rest = called if turn.calls else f"<|channel|>final<|message|>{turn.text}<|return|>"
    return (
        *encode_by_letters(f"<|channel|>analysis<|message|>{turn.thought}<|end|>"),
        *encode(f"<|start|>assistant{rest}"),
    )


def _qwen_tokens(turn: Turn) -> Sequence[int]:
    words = family_model(TINY_QWEN.name).vocabulary
    called = f'<tool_call>\n{{"name": "look", "arguments": {_arguments(turn)}}}\n</tool_call>'
    thought = ("<think>", *f"\n{turn.thought}\n", "</think>", "\n\n")
    rest = f"{called if turn.calls else turn.text}<|im_end|>"
    return (*(token for piece in thought for token in words.encode(piece)), *words.encode(rest))


def _arguments(turn: Turn) -> str:
    return json.dumps({"text": turn.text}, ensure_ascii=False)


@dataclass(frozen=True)
class Model:
    stages: Callable[[], ModelStages]
    tokens: Callable[[Turn], Sequence[int]]


HARMONY = Model(lambda: harmony_stages(load_encoding()), _harmony_tokens)
QWEN = Model(lambda: chat_stages(family_model(TINY_QWEN.name), ImageCache()), _qwen_tokens)
models = pytest.mark.parametrize(
    "model", [HARMONY, pytest.param(QWEN, marks=pytest.mark.vllm)], ids=["harmony", "qwen"]
)


def _pipeline(model: Model, engine: ScriptedEngine, store: Store) -> Pipeline[CreateResponse, ResponseEvent]:
    return sealing(responses_pipeline(model.stages(), engine, RunRegistry(store)), Sealer([KEY]))


async def _talk(
    model: Model,
    store: Store,
    turns: Sequence[Turn],
    go_on: Callable[[Json, Json, list[Json]], Json],
    /,
    **options: Any,
) -> list[Prompt]:
    """Return the prompts of a conversation; ``go_on`` makes each request after the first."""
    engine = ScriptedEngine()
    body: Json = {"input": [{"role": "user", "content": "Hi"}], "tools": [TOOL], **options}
    for turn in turns:
        engine.script = Script(model.tokens(turn))
        response = msgspec.to_builtins(final(await run_request(_pipeline(model, engine, store), body)))
        call = response["output"][-1].get("call_id")
        answer = {"type": "function_call_output", "call_id": call, "output": turn.reaction}
        body = go_on(body, response, [answer if call else {"role": "user", "content": turn.reaction}])
    await run_request(_pipeline(model, engine, store), body)
    return engine.prompts


def _from_store(body: Json, response: Json, news: list[Json]) -> Json:
    return {**body, "previous_response_id": response["id"], "input": news}


def _from_client(body: Json, response: Json, news: list[Json]) -> Json:
    """Send all items again, without any plain thought, and without the ids of thoughts, as some clients do."""
    return {**body, "input": [*body["input"], *map(_as_clients_keep_it, response["output"]), *news]}


def _as_clients_keep_it(item: Json) -> Json:
    if item["type"] != "reasoning":
        return item
    assert item["encrypted_content"]
    return {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}


@pytest.mark.defect("34")
@models
@given(_turns, st.sampled_from([None, "auto"]))
@example([Turn("xlookx", "xOslox", True, "x18x"), Turn("xsox", "xwarmx", False, "xthanksx")], None)
@examples(20)
def test_client_with_sealed_thoughts_needs_no_store(model: Model, turns: list[Turn], summary: str | None) -> None:
    async def talk() -> None:
        options = {"reasoning": {"summary": summary}}
        with TemporaryDirectory() as folder:
            async with open_store(str(Path(folder) / "responses.sqlite3")) as store:
                kept = await _talk(model, store, turns, _from_store, **options)
        carried = await _talk(model, Store(NullDatabase()), turns, _from_client, store=False, **options)
        assert [prompt.token_ids for prompt in carried] == [prompt.token_ids for prompt in kept]

    asyncio.run(talk())
