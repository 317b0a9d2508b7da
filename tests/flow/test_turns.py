from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.events import OutputItemAdded, ResponseEvent, TerminalEvent, to_sse
from penstock.pipeline.protocol.items import FunctionCall, Message, Reasoning
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.event_streams import final, harmony_pipeline, run_request
from tests.support.examples import examples
from tests.support.harmony import encode_by_letters
from tests.support.stores import open_store

Json = dict[str, Any]

WEATHER: Json = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
SHELL: Json = {"type": "custom", "name": "shell"}
AGENTS: Json = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [WEATHER]}
BODY: Json = {"input": "Hi", "tools": [WEATHER, SHELL, AGENTS]}
THOUGHT = "<|channel|>analysis<|message|>A greeting, I see.<|end|><|start|>assistant"


async def run_turn(text: str, body: Json = BODY, **script: Any) -> list[ResponseEvent]:
    return await run_request(
        harmony_pipeline(ScriptedEngine(Script(load_encoding().encode_markup(text), **script))), body
    )


# Tools that the model was trained on


@pytest.mark.defect("V8", "V9", "V10", "B12")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "arguments", ['{"query":"x"}', '{"query":', "print(1)", "[]", "null", "", '{"cursor":"cursor:3","id":"é"}']
)
@pytest.mark.parametrize(
    "tool",
    ["browser.search", "browser.open", "browser.find", "browser.run", "python", "container.exec", "repo_browser"],
)
async def test_undeclared_tool_call_is_reasoning(tool: str, arguments: str, size: int) -> None:
    text = f"<|channel|>analysis to={tool} code<|message|>{arguments}<|call|><|start|>assistant"
    events = await run_turn(f"{text}<|channel|>final<|message|>Hello!<|return|>", chunk_size=size)
    added = [(event.output_index, type(event.item)) for event in events if isinstance(event, OutputItemAdded)]
    response = final(events)
    assert added == [(0, Reasoning), (1, Message)]
    assert [type(item) for item in response.output] == [Reasoning, Message]
    assert response.status == "completed"
    assert text_of(response.output[0]) == arguments


def text_of(item: Any) -> str:
    return "".join(part.text for part in item.content)


@pytest.mark.defect("V7", "V18")
@pytest.mark.parametrize(
    ("recipient", "kind", "text"),
    [
        ("functions.get_weather", "function_call", "arguments"),
        ("get_weather", "function_call", "arguments"),
        ("agents.get_weather", "function_call", "arguments"),
        ("functions.shell", "custom_tool_call", "input"),
    ],
)
@pytest.mark.parametrize("said", ["{}", ""])
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", "<|return|>", "<|start|>assistant", ""])
async def test_call_with_any_recipient_and_end_is_done(
    recipient: str, kind: str, text: str, said: str, end: str
) -> None:
    events = await run_turn(f"{THOUGHT}<|channel|>commentary to={recipient}<|message|>{said}{end}")
    bodies = [json.loads(to_sse(event).partition(b"data: ")[2]) for event in events]
    ladder = [body for body in bodies if body.get("output_index") == 1]
    names = [body["type"].removeprefix("response.") for body in ladder]
    step = "function_call_arguments" if kind == "function_call" else "custom_tool_call_input"
    deltas = [f"{step}.delta"] * bool(said)
    assert names == ["output_item.added", *deltas, f"{step}.done", "output_item.done"]
    assert ladder[-2][text] == ladder[-1]["item"][text] == said
    assert ladder[-1]["item"]["status"] == "completed"


# Usage


@pytest.mark.defect("24")
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("thought", "rest"),
    [
        ("A greeting, I see.", "<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"),
        ("Call it.", "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{}<|call|>"),
        ("Hm, é 👩‍🚀", ""),
        ("", "<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"),
    ],
)
async def test_usage_counts_prompt_and_answer(thought: str, rest: str, size: int) -> None:
    tokens = load_encoding().encode_markup(f"<|channel|>analysis<|message|>{thought}{rest}")
    engine = ScriptedEngine(Script(tokens, chunk_size=size))
    usage = final(await run_request(harmony_pipeline(engine), BODY)).usage
    assert usage is not None
    assert usage.input_tokens == len(engine.prompts[0].token_ids)
    assert usage.output_tokens == len(tokens)
    assert usage.output_tokens_details.reasoning_tokens == len(load_encoding().encode(thought))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


# Cancelled


@pytest.mark.defect("B23")
@pytest.mark.parametrize("number", [0, 1, 2, 5, 9, 12])
async def test_run_of_a_cancelled_reader_is_stored_as_cancelled(number: int, tmp_path: Path) -> None:
    engine = ScriptedEngine(
        Script(load_encoding().encode_markup(f"{THOUGHT}<|channel|>final<|message|>Hi"), latency=0.001)
    )
    request = read_request(json.dumps(BODY).encode())
    seen: list[ResponseEvent] = []
    reached = asyncio.Event()

    async def consume(store: Store) -> None:
        async with harmony_pipeline(engine, store).open(source_of([request])) as events:
            async for event in events:
                seen.append(event)
                if event.sequence_number == number:
                    reached.set()

    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        task = asyncio.create_task(consume(store))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(isinstance(event, TerminalEvent) for event in seen)
        assert (engine.running, engine.aborted) == (0, 1)
        created = msgspec.json.decode(to_sse(seen[0]).partition(b"data: ")[2])
        stored = await store.get(created["response"]["id"], "")
        assert stored is not None
        assert stored.response.status == "cancelled"


# Continued


@pytest.mark.parametrize("size", [1, 1000])
async def test_prompt_after_a_call_has_the_engines_tokens(size: int, tmp_path: Path) -> None:
    tokens = encode_by_letters(
        f'{THOUGHT}<|channel|>commentary to=functions.get_weather json<|message|>{{"a": "Paris"}}<|call|>'
    )
    engine = ScriptedEngine(Script(tokens, chunk_size=size))
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        pipeline = harmony_pipeline(engine, store)
        called = final(await run_request(pipeline, BODY))
        call = called.output[-1]
        assert isinstance(call, FunctionCall)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 °C"}
        await run_request(pipeline, BODY | {"previous_response_id": called.id, "input": [output]})
    first, second = engine.prompts
    seen = (*first.token_ids, *tokens)
    assert second.token_ids[: len(seen)] == seen
    assert (
        load_encoding().decode(second.token_ids[len(seen) :]).startswith("<|start|>functions.get_weather to=assistant")
    )


# Sent back

_words = st.sampled_from(
    [
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        *("assistant", "analysis", "commentary", "final", " json", " to=functions.get_weather", " to=shell", "\n"),
        *(" to=agents.get_weather", " to=functions.a(b):<c", ' to=functions."x"', " to=python", " to=functions.é", " "),
        *("Hello", '{"city":', "é", "👩‍🚀", "\x00", "\u2028", "<|", "word " * 20),
    ]
)


@pytest.mark.defect("26", "20", "V12")
@given(st.lists(_words, max_size=40).map("".join), st.sampled_from([None, "auto"]), st.sampled_from([4, 1000]))
@examples(60)
def test_output_of_any_turn_can_be_sent_back(text: str, summary: str | None, limit: int) -> None:
    async def talk() -> None:
        encoding = load_encoding()
        tokens = encoding.encode_markup(text)[:limit]
        body = BODY | {"reasoning": {"summary": summary}}
        engine = ScriptedEngine(Script(tokens, reason="length" if limit == 4 else "stop"))
        output = msgspec.to_builtins(final(await run_request(harmony_pipeline(engine), body)).output)
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
            for item in output
            if "call_id" in item
        ]
        again = ScriptedEngine(Script(encoding.encode_markup("<|channel|>final<|message|>So.<|return|>")))
        history = [{"role": "user", "content": "Hi"}, *output, *results, {"role": "user", "content": "And?"}]
        response = final(await run_request(harmony_pipeline(again), body | {"input": history}))
        assert response.status == "completed"
        prompt = encoding.decode(again.prompts[0].token_ids)
        for item in output:
            if item["type"] == "message":
                assert all(part["text"] in prompt for part in item["content"])
            elif item["type"] != "reasoning":
                assert item.get("arguments", item.get("input")) in prompt

    asyncio.run(talk())
