"""Compaction: a summary takes the place of a conversation, whichever way it is asked for, and the model goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.cli.replayer import replay_of
from penstock.api.http.auth import Keys
from penstock.extensions.workbench.diff import comparisons, recorded_lines, replayed_lines
from penstock.pipeline.protocol import events
from penstock.pipeline.recordings.comparison import first_difference
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.summarize import INSTRUCTION, LEFT_OUT
from tests.support.api_clients import openai_client
from tests.support.chat_families import load_model
from tests.support.event_streams import checked, final, read_sse
from tests.support.server import (
    CALL,
    HELLO,
    WEATHER,
    ScriptedServer,
    only_recording,
    recording_server,
    running_server,
    script,
)

SUMMARY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Ann asked for tea."
TRIGGER = {"type": "compaction_trigger"}
READ = "<|start|>user<|message|>The conversation before this point was compacted."

TALK: list[Any] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "I am Ann."},
    {"role": "assistant", "content": "Hello, Ann."},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "She wants tea."}]},
    {"type": "function_call", "name": "brew", "call_id": "call_1", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "The kettle is on."},
]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path) as served:
        yield served


async def compact(served: ScriptedServer, *talk: dict[str, Any], **fields: Any) -> dict[str, Any]:
    served.engine.script = script(SUMMARY)
    response: dict[str, Any]
    status, response = await served.post({"input": [*talk, TRIGGER], **fields})
    served.engine.script = script(HELLO)
    assert (status, response["status"]) == (200, "completed")
    return response


async def test_trigger_gives_exactly_one_sealed_compaction(served: ScriptedServer) -> None:
    served.engine.script = script(SUMMARY)
    sent = {"input": [*TALK, TRIGGER], "tools": [WEATHER], "store": False, "reasoning": {"summary": "auto"}}
    stream = checked(read_sse(await served.stream(sent)))
    assert [type(event) for event in stream] == [
        *(events.ResponseCreated, events.ResponseInProgress, events.OutputItemAdded, events.CompactionCompacting),
        *(events.OutputItemDone, events.ResponseCompleted),
    ]
    (item,) = final(stream).output
    assert item.id.startswith("cmp_")
    assert "tea" not in str(stream)
    usage = final(stream).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(served.engine.prompts[0].token_ids), 16)


async def test_summary_is_asked_for_without_tools_and_with_little_effort(served: ScriptedServer) -> None:
    await compact(served, *TALK, tools=[WEATHER], reasoning={"effort": "high"}, max_output_tokens=16)
    prompt = served.prompt_text()
    assert "Reasoning: low" in prompt
    assert "get_weather" not in prompt
    assert prompt.endswith(f"<|start|>user<|message|>{INSTRUCTION}<|end|><|start|>assistant")
    assert "The kettle is on." in prompt
    assert served.engine.prompts[0].facts.sampling.max_tokens == 8192


async def test_compaction_supersedes_all_but_messages_to_the_model(served: ScriptedServer) -> None:
    (item,) = (await compact(served, *TALK))["output"]
    status, _ = await served.post({"input": [*TALK, item, {"role": "user", "content": "Milk, too."}]})
    assert status == 200
    prompt = served.prompt_text()
    assert "# Instructions\n\nBe kind.<|end|><|start|>user<|message|>I am Ann.<|end|>" + READ in prompt
    assert "Ann asked for tea." in prompt
    assert prompt.endswith("<|start|>user<|message|>Milk, too.<|end|><|start|>assistant")
    for superseded in ("Hello, Ann.", "brew", "kettle"):
        assert superseded not in prompt


async def test_generation_starts_right_after_a_compaction(served: ScriptedServer) -> None:
    (item,) = (await compact(served, *TALK))["output"]
    assert (await served.post({"input": [TALK[1], item]}))[0] == 200
    assert served.prompt_text().endswith("do not repeat what is done.<|end|><|start|>assistant")


@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_chain_goes_on_after_a_compaction(served: ScriptedServer, way: dict[str, Any]) -> None:
    _, first = await served.post({"input": "I am Ann."})
    served.engine.script = script(SUMMARY)
    sent = {"input": [{"role": "user", "content": "Tea!"}, TRIGGER], "previous_response_id": first["id"], **way}
    _, second = await served.post(sent)
    second = await served.wait_for_end(second["id"])
    assert [item["type"] for item in second["output"]] == ["compaction"]
    served.engine.script = script(HELLO)
    assert (await served.post({"input": "Milk, too.", "previous_response_id": second["id"]}))[0] == 200
    prompt = served.prompt_text()
    assert f"<|start|>user<|message|>I am Ann.<|end|><|start|>user<|message|>Tea!<|end|>{READ}" in prompt
    assert "Ann asked for tea." in prompt
    assert "Hello!" not in prompt


async def test_conversation_goes_on_after_a_compaction(served: ScriptedServer) -> None:
    _, conversation = await served.post({"items": TALK[:3]}, "/v1/conversations")
    await compact(served, conversation=conversation["id"])
    assert (await served.post({"input": "Milk, too.", "conversation": conversation["id"]}))[0] == 200
    prompt = served.prompt_text()
    assert "Ann asked for tea." in prompt
    assert "Hello, Ann." not in prompt
    _, listed = await served.get(f"/v1/conversations/{conversation['id']}/items?order=asc")
    assert [item["type"] for item in listed["data"]] == [*["message"] * 3, "compaction", "message", *ANSWER]


ANSWER = ["reasoning", "message"]
THRESHOLD = [{"type": "compaction", "compact_threshold": 50}]


async def test_full_context_is_compacted_within_the_turn(served: ScriptedServer) -> None:
    served.engine.turns = (script(SUMMARY), script(CALL))
    sent = {"input": [*TALK, {"role": "user", "content": "And now?"}], "tools": [WEATHER]}
    stream = checked(read_sse(await served.stream({**sent, "context_management": THRESHOLD})))
    response = final(stream)
    assert [item.id.partition("_")[0] for item in response.output] == ["cmp", "rs", "fc"]
    assert response.tools == (WEATHER,)
    asked, prompt = map(served.prompt_text, range(2))
    assert INSTRUCTION in asked
    assert "And now?<|end|>" + READ in prompt
    assert "get_weather" in prompt
    assert "kettle" not in prompt
    lengths = [len(prompt.token_ids) for prompt in served.engine.prompts]
    assert response.usage is not None
    assert response.usage.input_tokens == sum(lengths)


async def test_context_below_the_threshold_is_left_alone(served: ScriptedServer) -> None:
    for wanted in ([{"type": "compaction"}], [{"type": "compaction", "compact_threshold": 100_000}]):
        _, response = await served.post({"input": TALK, "context_management": wanted})
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


async def test_context_without_anything_to_supersede_is_left_alone(served: ScriptedServer) -> None:
    _, response = await served.post({"input": "tea " * 100, "context_management": THRESHOLD})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


async def test_chain_is_compacted_again_only_if_it_has_grown(served: ScriptedServer) -> None:
    served.engine.turns = (script(SUMMARY),)
    fields = {"context_management": [{"type": "compaction", "compact_threshold": 250}]}
    _, first = await served.post({"input": [*TALK, {"role": "assistant", "content": "Tea. " * 100}], **fields})
    _, second = await served.post({"input": "And?", "previous_response_id": first["id"], **fields})
    _, third = await served.post({"input": "More " * 150, "previous_response_id": second["id"], **fields})
    kinds = [[item["type"] for item in response["output"]] for response in (first, second, third)]
    assert kinds == [["compaction", *ANSWER], ANSWER, ["compaction", *ANSWER]]


async def test_endpoint_returns_the_window_that_replaces_the_conversation(
    served: ScriptedServer,
) -> None:
    async with openai_client(served.url) as sdk:
        served.engine.script = script(SUMMARY)
        compacted = await sdk.responses.compact(model="tiny", input=TALK, instructions="Be brief.")
        assert compacted.object == "response.compaction"
        assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
        assert compacted.usage.output_tokens == 16
        served.engine.script = script(HELLO)
        window: Any = [item.to_dict(warnings=False) for item in compacted.output]
        await sdk.responses.create(model="tiny", input=[*window, {"role": "user", "content": "Milk, too."}])
        assert "Ann asked for tea." in served.prompt_text()
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(compacted.id)


async def test_endpoint_needs_a_model(served: ScriptedServer) -> None:
    status, error = await served.post({"input": TALK}, "/v1/responses/compact")
    assert (status, error["error"]["param"]) == (400, "model")


async def test_endpoint_compacts_a_stored_chain(served: ScriptedServer) -> None:
    _, first = await served.post({"input": "I am Ann."})
    served.engine.script = script(SUMMARY)
    sent = {"model": "tiny", "previous_response_id": first["id"]}
    status, compacted = await served.post(sent, "/openresponses/v1/responses/compact")
    assert (status, [item["type"] for item in compacted["output"]]) == (200, ["message", "compaction"])


EMPTY = "<|channel|>analysis<|message|>I do not know.<|end|>"


async def test_missing_summary_is_a_failure(served: ScriptedServer) -> None:
    served.engine.script = script(EMPTY)
    response = final(checked(read_sse(await served.stream({"input": [*TALK, TRIGGER]}))))
    assert (response.status, response.output) == ("failed", ())
    assert response.error is not None
    assert "wrote no summary" in response.error.message
    status, error = await served.post({"model": "tiny", "input": TALK}, "/v1/responses/compact")
    assert (status, "wrote no summary" in error["error"]["message"]) == (500, True)


async def test_cut_summary_is_kept(served: ScriptedServer) -> None:
    served.engine.script = script(SUMMARY, reason="length")
    assert final(read_sse(await served.stream({"input": [*TALK, TRIGGER]}))).status == "completed"


async def test_history_that_is_too_long_loses_its_oldest_outputs_first(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(SUMMARY), context_length=2000), tmp_path) as served:
        calls = [
            item
            for number in range(4)
            for item in (
                {"type": "function_call", "name": "read", "call_id": f"call_{number}", "arguments": "{}"},
                {"type": "function_call_output", "call_id": f"call_{number}", "output": f"{number}: {'word ' * 500}"},
            )
        ]
        status, response = await served.post({"input": [TALK[1], *calls, TRIGGER]})
        assert (status, response["status"]) == (200, "completed")
        prompt = served.prompt_text()
        assert prompt.count(LEFT_OUT) == 2
        assert "I am Ann." in prompt
        assert ["0: word" in prompt, "3: word" in prompt] == [False, True]
        assert len(served.engine.prompts[0].token_ids) <= 1500
        status, response = await served.post({"input": [{"role": "user", "content": "word " * 3000}, TRIGGER]})
        assert (status, response["status"]) == (200, "completed")


async def test_trigger_is_the_last_item(served: ScriptedServer) -> None:
    status, error = await served.post({"input": [TRIGGER, *TALK]})
    assert (status, error["error"]["param"]) == (400, "input[0]")
    status, error = await served.post({"input": [TRIGGER]})
    assert (status, error["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("text", ["", "gAAAAAforeign", "pst1.AAAA", "pst1." + "A" * 200])
async def test_unverified_compaction_is_refused(served: ScriptedServer, text: str) -> None:
    status, error = await served.post({"input": [TALK[1], {"type": "compaction", "encrypted_content": text}]})
    assert status == 400
    assert (error["error"]["code"], error["error"]["param"]) == (
        "invalid_encrypted_content",
        "input[1].encrypted_content",
    )


async def test_compaction_that_a_later_one_supersedes_is_not_opened(served: ScriptedServer) -> None:
    (item,) = (await compact(served, *TALK))["output"]
    unread = {"type": "compaction", "encrypted_content": "pst1.AAAA"}
    assert (await served.post({"input": [TALK[1], unread, item]}))[0] == 200
    assert (await served.post({"input": [TALK[1], item, unread]}))[0] == 400


async def test_compaction_of_another_owner_is_refused(tmp_path: Path) -> None:
    keys = ("a" * 20, "b" * 20)
    engine = ScriptedEngine(script(SUMMARY))
    async with (
        running_server(engine, tmp_path, keys=Keys(None, keys)) as served,
        openai_client(served.url, keys[0]) as ann,
        openai_client(served.url, keys[1]) as bob,
    ):
        window: Any = (await ann.responses.compact(model="tiny", input=TALK)).output
        given: Any = [item.to_dict(warnings=False) for item in window]
        assert (await ann.responses.create(model="tiny", input=given)).status == "completed"
        with pytest.raises(openai.BadRequestError) as refused:
            await bob.responses.create(model="tiny", input=given)
        assert refused.value.code == "invalid_encrypted_content"


async def test_compaction_opens_after_a_restart(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script(SUMMARY)), tmp_path) as served:
        (item,) = (await compact(served, *TALK, store=False))["output"]
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path) as served:
        assert (await served.post({"input": [TALK[1], item]}))[0] == 200
        assert "Ann asked for tea." in served.prompt_text()


async def test_summary_is_not_logged(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    (item,) = (await compact(served, *TALK))["output"]
    await served.post({"input": [item]})
    assert "tea" not in caplog.text


@pytest.mark.long
async def test_model_with_a_chat_template_compacts_too(tmp_path: Path) -> None:
    model = load_model()
    encode, decode = model.vocabulary.encode, model.vocabulary.decode

    def said(text: str) -> Script:
        return Script((*encode(text), model.vocabulary.marks["<|im_end|>"]))

    engine = ScriptedEngine(said("<think>\nHm.\n</think>\n\nAnn asked for tea."))
    async with running_server(engine, tmp_path, model=model) as served:
        _, response = await served.post({"input": [*TALK, TRIGGER], "store": False, "tools": [WEATHER]})
        assert [item["type"] for item in response["output"]] == ["compaction"]
        asked = decode(engine.prompts[0].token_ids)
        assert INSTRUCTION in asked
        assert "get_weather" not in asked
        engine.script = said("<think>\n\n</think>\n\nYes.")
        engine.turns = (said("<think>\nHm.\n</think>\n\nAnn wants milk in it."),)
        talk = [*TALK, *response["output"], {"role": "assistant", "content": "Milk? " * 60}]
        _, response = await served.post(
            {"input": [*talk, {"role": "user", "content": "?"}], "context_management": THRESHOLD}
        )
        assert [item["type"] for item in response["output"]] == ["compaction", "message"]
        before, after = (decode(prompt.token_ids) for prompt in engine.prompts[1:])
        assert "Ann asked for tea." in before
        assert "Ann asked for tea." not in after
        assert "Ann wants milk in it." in after
        assert ["kettle" in before, "Milk? " in after, "I am Ann." in after] == [False, False, True]


@pytest.mark.parametrize(
    "sent", [{"input": [*TALK, TRIGGER]}, {"input": TALK, "context_management": THRESHOLD}], ids=str
)
async def test_recorded_compaction_is_replayed(tmp_path: Path, sent: dict[str, Any]) -> None:
    engine = ScriptedEngine(script(HELLO), turns=(script(SUMMARY),))
    async with recording_server(engine, tmp_path / "recorded") as served:
        seen = read_sse(await served.stream(sent))
    folder = only_recording(tmp_path / "recorded")
    again = await replay_of(folder)
    assert [type(frame) for frame in again.trace.junctions[-1].frames] == [type(event) for event in seen]
    assert all(
        first_difference(each.one, each.other, exact=False) is None
        for each in comparisons(recorded_lines(folder), replayed_lines(again))
    )
