"""Compactions of Messages: a request for a summary, which a client sends from then on in place of the conversation."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from penstock.extensions.dialects.messages.compaction import INSTRUCTIONS
from tests.support.messages import PATH
from tests.support.server import CALL, PacedServer, script

Json = dict[str, Any]

WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HI: Json = {"role": "user", "content": "How is Paris?"}
ASKING: Json = {"model": "tiny", "max_tokens": 100, "system": "Be brief.", "tools": [WEATHER], "messages": [HI]}
COMPACT: Json = {"compaction": {"type": "summarize"}}
SUMMARY = "<|channel|>analysis<|message|>Sum up.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
BLOCK: Json = {"type": "compaction", "content": "It rains."}


@pytest.fixture(autouse=True)
def summarizing(served: PacedServer) -> None:
    served.engine.script = script(SUMMARY)


async def whole(served: PacedServer, **fields: Any) -> Json:
    """Return the answer to a request."""
    answer: Json
    status, answer = await served.post({**ASKING, **fields}, PATH)
    assert status == 200, answer
    return answer


async def test_answer_is_the_summary_alone(served: PacedServer, claude: anthropic.AsyncAnthropic) -> None:
    answer = await whole(served, **COMPACT)
    assert answer["content"] == [{**BLOCK, "encrypted_content": None}]
    assert answer["stop_reason"] == "compaction"
    assert served.prompt_text().endswith(f"{INSTRUCTIONS}<|end|><|start|>assistant")
    assert "type get_weather" not in served.prompt_text()
    streamed = [event async for event in await claude.beta.messages.create(**ASKING, **COMPACT, stream=True)]
    assert [event.type for event in streamed] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    delta, end = streamed[2].to_dict()["delta"], streamed[4].to_dict()
    assert delta == {"type": "compaction_delta", "content": "It rains.", "encrypted_content": None}
    assert end["usage"] == answer["usage"]


@pytest.mark.parametrize(
    ("given", "expected"), [("Only names.", "Only names."), (" ", INSTRUCTIONS), (None, INSTRUCTIONS)]
)
async def test_instructions_take_the_place_of_the_servers(
    served: PacedServer, given: str | None, expected: str
) -> None:
    await whole(served, compaction={"type": "summarize", "instructions": given})
    assert served.prompt_text().endswith(f"<|start|>user<|message|>{expected}<|end|><|start|>assistant")


@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_summary_stands_for_all_before_it(served: PacedServer, role: str) -> None:
    old: list[Json] = [HI, {"role": "assistant", "content": "Dry."}, {**HI, "content": "Old?"}]
    after: Json = {"role": "user", "content": "And now?"}
    await whole(served, messages=[{"role": role, "content": [BLOCK]}, after])
    expected = served.engine.prompts[-1].token_ids
    assert "It rains." in served.prompt_text()
    for before in (old, [*old, {"role": "assistant", "content": [{**BLOCK, "content": "It snows."}]}]):
        text = {"type": "text", "text": "Older."}
        summary = {"role": role, "content": [text, {**BLOCK, "encrypted_content": "x", "signature": "y"}]}
        await whole(served, messages=[*before, summary, after])
        assert served.engine.prompts[-1].token_ids == expected
    failed = {"role": "assistant", "content": [{**BLOCK, "content": None}, {"type": "text", "text": "Well."}]}
    await whole(served, messages=[*old, failed, after])
    assert "Old?" in served.prompt_text()


async def test_errors_after_a_summary_name_their_place(served: PacedServer) -> None:
    result = {"type": "tool_result", "tool_use_id": "x"}
    messages = [HI, {"role": "assistant", "content": [BLOCK]}, {"role": "user", "content": [result]}]
    status, answer = await served.post({**ASKING, "messages": messages}, PATH)
    assert (status, answer["error"]["message"].endswith("(at messages[2].content[0].tool_use_id)")) == (400, True)
    status, _ = await served.post(
        {**ASKING, "messages": [{"role": "user", "content": [{**BLOCK, "content": ""}]}]}, PATH
    )
    assert status == 400


async def test_summary_brings_its_tool_changes(served: PacedServer) -> None:
    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**WEATHER, "name": "far"}}},
    ]
    await whole(served, messages=[{"role": "assistant", "content": [{**BLOCK, "tool_changes": changes}]}, HI])
    assert served.engine.prompts[-1].facts.tools.allowed == ((None, "far"),)


REMOVED: Json = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"context_management": {"edits": []}}, "context_management"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [HI, {"role": "system", "content": [REMOVED]}]}, "compaction: Extra inputs are not permitted"),
        ({"compaction": {"type": "nonsense"}}, "compaction.type"),
    ],
)
async def test_what_a_summary_cannot_have_is_refused(served: PacedServer, changed: Json, place: str) -> None:
    status, answer = await served.post({**ASKING, **COMPACT, **changed}, PATH)
    assert (status, place in answer["error"]["message"]) == (400, True)


async def test_summary_that_is_cut_is_none(served: PacedServer) -> None:
    served.engine.script = script("<|channel|>final<|message|>It rai", reason="length")
    answer = await whole(served, **COMPACT)
    assert (answer["content"][0]["content"], answer["stop_reason"]) == (None, "compaction")


async def test_tool_runner_of_the_sdk_compacts(served: PacedServer, claude: anthropic.AsyncAnthropic) -> None:
    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Get the weather."""
        served.engine.script = script(SUMMARY)
        return f"Sunny in {city}"

    served.engine.script = script(CALL)
    runner = claude.beta.messages.tool_runner(**{**ASKING, "tools": [get_weather]})
    kinds: list[list[str]] = []
    async for message in runner:
        if not kinds:
            runner.compact_before_next_turn()
        kinds.append([block.type for block in message.content])
    assert kinds == [["thinking", "tool_use"], ["compaction"], ["thinking", "text"]]
    assert "How is Paris?" not in served.prompt_text()
    assert "It rains." in served.prompt_text()
