"""Histories as clients really send them, rendered: each must read as the golden prompt beside it.

``pytest tests/test_histories.py --regen`` rewrites the prompts; ids and date are fixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.core import Pipeline
from pipeline.errors import InvalidRequest
from pipeline.protocol.reading import read_request
from pipeline.record import replay
from stages.harmony import HarmonyEncoding
from stages.normalize.normalize import Normalize
from stages.persist.store import Store, StoredResponse
from stages.render.harmony import RenderHarmony
from tests.databases import opened

FIXTURES = Path(__file__).parent.parent / "fixtures" / "clients"
CASES = sorted(case.name for case in FIXTURES.glob("*/"))
WHOLE = (
    "agents_replayed",
    "ai_sdk_stored",
    "langchain_replayed",
    "langchain_summary",
    "open_responses_replayed",
    "pydantic_ai_replayed",
)
"""Of those that lose nothing: some send no phase, some a summary for the reasoning, some ids for the items."""
CREATED_AT = 1_790_000_000.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store, None]:
    async with opened(str(tmp_path / "responses.sqlite3")) as store:
        yield store


async def rendered(body: dict[str, Any], store: Store, encoding: HarmonyEncoding) -> str:
    """The prompt that a body becomes."""
    normalize = Normalize(store, ("tiny-gpt-oss",), draw=lambda: "0" * 32, clock=lambda: CREATED_AT)
    pipeline = Pipeline.start("normalize", normalize).then("render", RenderHarmony(encoding))
    async with pipeline.open(replay([await read_request(json.dumps(body).encode())])) as prompts:
        [prompt] = [prompt async for prompt in prompts]
    return encoding.decode(prompt.token_ids)


async def given(case: str, store: Store) -> dict[str, Any]:
    """The body of a case, and in the store what it relies on."""
    earlier = FIXTURES / case / "stored.jsonl"
    for line in earlier.read_bytes().splitlines() if earlier.exists() else ():
        stored = msgspec.json.decode(line, type=StoredResponse)
        store.begin(stored)
        await store.end(stored, None)
    body: dict[str, Any] = json.loads((FIXTURES / case / "request.json").read_text())
    return body


def said(prompt: str) -> str:
    """A prompt from the first word of the user on: what was said, without who is told how to behave."""
    return prompt[prompt.index("<|start|>user") :].replace('": ', '":').replace(', "', ',"')


@pytest.mark.parametrize("case", CASES)
async def test_row20_a_history_renders(
    case: str, store: Store, encoding: HarmonyEncoding, request: pytest.FixtureRequest
) -> None:
    """Whatever a client sends back of a conversation is taken, and reads as it should."""
    prompt = await rendered(await given(case, store), store, encoding)
    golden = FIXTURES / case / "prompt.txt"
    if request.config.getoption("--regen"):
        golden.write_text(prompt)
    assert prompt == golden.read_text()


def test_the_readme_lists_every_case() -> None:
    """Where each history comes from is written down."""
    readme = (FIXTURES / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` ", readme, re.MULTILINE)) == CASES


async def test_v12_row19_a_stored_history_reads_as_one_that_is_sent(store: Store, encoding: HarmonyEncoding) -> None:
    """By previous_response_id, calls, outputs and reasoning come back as if the client had sent them."""
    by_id = await rendered(await given("agents_by_id", store), store, encoding)
    assert by_id == (FIXTURES / "agents_replayed" / "prompt.txt").read_text()


@pytest.mark.parametrize("case", WHOLE)
def test_row21_clients_agree_on_what_was_said(case: str) -> None:
    """One conversation reads the same, whichever client sends it: reasoning, preamble, calls and outputs in order."""
    prompts = [said((FIXTURES / name / "prompt.txt").read_text()) for name in ("openai_replayed", case)]
    assert prompts[0] == prompts[1]


def test_row21_a_turn_keeps_its_parts_apart() -> None:
    """Reasoning, preamble and call of one turn are messages of their own, in their order."""
    prompt = (FIXTURES / "openai_replayed" / "prompt.txt").read_text()
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>First the plan, then the call.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look up the weather in Madrid.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Madrid"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"temperature": 31, "unit": "C"}'
        "<|end|><|start|>assistant"
    )


async def test_v11_b20_a_continuation_has_its_own_instructions_tools_and_effort(
    store: Store, encoding: HarmonyEncoding
) -> None:
    """What a request says of itself replaces what the response that it continues was told."""
    body = await given("agents_by_id", store)
    tool = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    told = {"instructions": "Be brief.", "tools": [tool], "reasoning": {"effort": "high"}}
    head = (await rendered({**body, **told}, store, encoding)).split("<|start|>user")[0]
    assert "Reasoning: high" in head
    assert "Be brief." in head
    assert "get_time" in head
    assert "You know the weather." not in head
    assert "get_weather" not in head


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], ""),
        ([{"type": "output_text", "text": "One. "}, {"type": "output_text", "text": "Two."}], "One. Two."),
        ([{"type": "refusal", "refusal": "I would rather not."}], "I would rather not."),
    ],
    ids=["empty", "parts", "refusal"],
)
async def test_v13_b28_a_message_is_rendered_whole(
    content: list[Any], text: str, store: Store, encoding: HarmonyEncoding
) -> None:
    """An assistant's message with any number of parts, of any kind, is one message of the prompt."""
    message = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}
    body = {"input": [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "And?"}]}
    prompt = await rendered(body, store, encoding)
    assert f"<|start|>assistant<|channel|>final<|message|>{text}<|end|><|start|>user" in prompt


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
async def test_v14_an_image_or_file_is_never_dropped_silently(
    kind: str, store: Store, encoding: HarmonyEncoding
) -> None:
    """What a text model cannot read is refused, by the place where it stands."""
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": kind, "file_id": "file_1"}]
    with pytest.raises(InvalidRequest) as refused:
        await rendered({"input": [{"role": "user", "content": parts}]}, store, encoding)
    assert refused.value.param == "input[0].content[1]"


async def test_v15_an_output_of_parts_is_rendered_whole(store: Store, encoding: HarmonyEncoding) -> None:
    """The parts of a call's output join into one text."""
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "One. "}, {"type": "input_text", "text": "Two."}]
    body = {"input": [call, {"type": "function_call_output", "call_id": "call_1", "output": parts}]}
    prompt = await rendered(body, store, encoding)
    assert "<|start|>functions.f to=assistant<|channel|>commentary<|message|>One. Two.<|end|>" in prompt
