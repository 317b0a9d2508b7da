"""Chat Completions over a real socket, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from penstock.api.http.padding import BLOCK
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.chat_streams import chunks_of, heard_by_openai
from tests.support.server import ENDLESS, ScriptedServer, running_server, script

PATH = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"messages": [USER]}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello!<|return|>"
FUNCTION: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":1}<|call|>'


async def test_openai_python_gets_the_same_answer_whole_and_as_a_stream(
    served: ScriptedServer, sdk: openai.AsyncOpenAI
) -> None:
    served.engine.script = script(THOUGHT + FINAL)
    whole = await sdk.chat.completions.create(model="tiny", messages=[USER])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello!", "stop")
    assert whole.choices[0].message.model_extra == {"reasoning": "Hm.", "reasoning_content": "Hm."}
    assert whole.usage
    async with sdk.chat.completions.stream(
        model="tiny", messages=[USER], stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.content == "Hello!"
    assert streamed.usage == whole.usage


async def test_a_round_trip_of_a_tool(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.script = script(THOUGHT + CALL)
    first = await sdk.chat.completions.create(model="tiny", messages=[USER], tools=[FUNCTION])
    message = first.choices[0].message
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert message.tool_calls
    served.engine.script = script(THOUGHT + FINAL)
    answer: Any = message.to_dict()
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a house"}
    second = await sdk.chat.completions.create(model="tiny", messages=[USER, answer, result], tools=[FUNCTION])
    assert second.choices[0].message.content == "Hello!"
    prompt = served.prompt_text()
    assert prompt.index("Hm.") < prompt.index('{"at":1}') < prompt.index("a house")


async def test_a_structured_answer_is_parsed(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    class Count(BaseModel):
        n: int

    served.engine.script = script('<|channel|>final <|constrain|>json<|message|>{"n":3}<|return|>')
    parsed = await sdk.chat.completions.parse(model="tiny", messages=[USER], response_format=Count)
    assert parsed.choices[0].message.parsed == Count(n=3)


async def test_choices_are_runs_over_one_prompt(served: ScriptedServer) -> None:
    served.engine.script = script(THOUGHT + FINAL)
    body = {**BODY, "n": 3, "seed": 7}
    status, whole = await served.post(body, PATH)
    assert (status, [choice["index"] for choice in whole["choices"]]) == (200, [0, 1, 2])
    assert {prompt.token_ids for prompt in served.engine.prompts} == {served.engine.prompts[0].token_ids}
    assert sorted(prompt.facts.sampling.seed or 0 for prompt in served.engine.prompts) == [7, 8, 9]
    _, one = await served.post(BODY, PATH)
    assert whole["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    stream = await served.stream({**body, "stream_options": {"include_usage": True}}, PATH)
    heard = heard_by_openai(stream)
    assert {**heard, "id": "", "created": 0} == {**whole, "id": "", "created": 0}
    assert len({chunk["id"] for chunk in chunks_of(stream)}) == 1


COUNTING: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("n", [1, 2])
async def test_each_chunk_may_have_the_usage_so_far(served: ScriptedServer, n: int) -> None:
    """Clients that measure load ask for it, as they do of vLLM."""
    served.engine.script = script(THOUGHT + FINAL)
    body = {**BODY, "n": n, "stream_options": COUNTING}
    stream = await served.stream(body, PATH)
    *chunks, last = chunks_of(stream)
    for choice in range(n):
        usages = [each["usage"] for each in chunks if each["choices"][0]["index"] == choice]
        counts = [usage["completion_tokens"] for usage in usages]
        assert (counts[0], counts) == (0, sorted(counts))
        assert counts[-1] * n == last["usage"]["completion_tokens"]
        assert len(set(counts)) > 5
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    plain = await served.stream({**body, "stream_options": {"include_usage": True}}, PATH)
    assert {**heard_by_openai(stream), "id": "", "created": 0} == {**heard_by_openai(plain), "id": "", "created": 0}


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"continuous_usage_stats": False}])
async def test_usage_so_far_needs_the_usage(served: ScriptedServer, options: dict[str, Any]) -> None:
    for more in ({}, {"include_usage": False}):
        stream = await served.stream({**BODY, "stream_options": {**options, **more}}, PATH)
        assert all("usage" not in chunk for chunk in chunks_of(stream))


async def test_a_client_that_leaves_frees_the_engine_of_all_choices(served: ScriptedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    async with served.client.post(served.url + PATH, json={**BODY, "n": 3, "stream": True}) as answer:
        await answer.content.readline()
        assert served.engine.running == 3
    await served.wait_until_idle()
    assert served.engine.aborted == 3


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_refusal_before_the_answer_is_a_status(served: ScriptedServer, choices: int) -> None:
    served.engine.script = script(FINAL, refusal=EngineOverloaded("It is full."))
    for stream in (False, True):
        status, answer = await served.post({**BODY, "n": choices, "stream": stream}, PATH)
        assert (status, answer["error"]["message"]) == (503, "It is full.")
    await served.wait_until_idle()


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_fault_in_the_middle_is_the_last_event(served: ScriptedServer, choices: int) -> None:
    served.engine.script = script(THOUGHT, error=EngineFailed("It broke."))
    body = {**BODY, "n": choices}
    status, answer = await served.post(body, PATH)
    assert (status, answer["error"]["message"]) == (500, "It broke.")
    chunks = chunks_of(await served.stream(body, PATH))
    assert [chunk["error"]["message"] for chunk in chunks if "error" in chunk] == ["It broke."]
    assert "error" in chunks[-1]
    await served.wait_until_idle()


async def test_openai_python_raises_a_fault(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.script = script(THOUGHT, error=EngineFailed("It broke."))
    with pytest.raises(openai.APIError, match="It broke"):
        async for _ in await sdk.chat.completions.create(model="tiny", messages=[USER], stream=True):
            pass


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"messages": [USER, {"role": "tool", "tool_call_id": "c", "content": "x"}]}, 400, "messages[1].tool_call_id"),
        (
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
                ]
            },
            400,
            "messages[1].content[0]",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}, "strict": True}}]},
            400,
            "tools[0].function.parameters",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#"}, "strict": True},
                }
            },
            400,
            "response_format.json_schema.schema",
        ),
        (
            {"ignore_eos": True, "response_format": {"type": "json_object"}},
            400,
            "ignore_eos",
        ),
    ],
)
async def test_what_later_stages_refuse_is_named_as_in_the_body(
    served: ScriptedServer, fields: dict[str, Any], status: int, param: str
) -> None:
    answered, answer = await served.post({**BODY, **fields}, PATH)
    assert (answered, answer["error"]["param"]) == (status, param)


async def test_a_long_answer_is_cut_at_any_number_of_tokens(served: ScriptedServer) -> None:
    served.engine.script = script(THOUGHT + FINAL)
    _, answer = await served.post({**BODY, "max_tokens": 1}, PATH)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)


async def test_a_benchmark_gets_the_tokens_that_it_asks_for(served: ScriptedServer) -> None:
    """The model goes on after the end of its turn, with another message or with anything else."""
    after = "<|start|>assistant<|channel|>final<|message|>Again.<|return|> and so on<|call|><|end|>"
    served.engine.script = script(FINAL + after, stops=True)
    _, stopped = await served.post(BODY, PATH)
    _, answer = await served.post({**BODY, "ignore_eos": True}, PATH)
    count = len(served.engine.script.token_ids)
    assert (stopped["usage"]["completion_tokens"], answer["usage"]["completion_tokens"]) == (6, count)
    assert answer["choices"][0]["message"]["content"].startswith("Hello!\n\nAgain.")


async def test_only_what_the_client_wants_stored_is(served: ScriptedServer) -> None:
    served.engine.script = script(FINAL)
    for store, status in ((None, 404), (False, 404), (True, 200)):
        _, answer = await served.post({**BODY, "store": store}, PATH)
        response_id = answer["id"].replace("chatcmpl-", "resp_")
        assert (await served.get(f"/v1/responses/{response_id}"))[0] == status


async def test_choices_count_as_responses_of_their_key(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(responses=2)}
    engine = ScriptedEngine(script=script(FINAL))
    async with running_server(engine, tmp_path, admission=admission) as served:
        assert (await served.post({**BODY, "n": 2}, PATH))[0] == 200
        served.engine.script = script(ENDLESS, endless=True, latency=0.01)
        status, answer = await served.post({**BODY, "n": 3}, PATH)
        await served.wait_until_idle()
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_it_is_recorded_as_a_request_of_the_responses_api(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", pause=0.01)
    try:
        async with running_server(ScriptedEngine(script=script(FINAL)), tmp_path, edit=recorder.tapped) as served:
            await served.post({**BODY, "max_tokens": 9}, PATH)
            await asyncio.sleep(0.1)
    finally:
        await recorder.close()
    [folder] = (tmp_path / "recordings").iterdir()
    recorded = json.loads((folder / "request.json").read_bytes())
    assert (recorded["max_output_tokens"], recorded["store"]) == (9, False)
    content = [{"type": "input_text", "text": "Hi"}]
    assert recorded["input"] == [{"type": "message", "status": "completed", "role": "user", "content": content}]


async def test_padding_hides_the_length_of_each_chunk(served: ScriptedServer) -> None:
    served.engine.script = script(THOUGHT + FINAL)
    asking = {**BODY, "stream": True}
    plain = await served.stream(asking, PATH)
    served.engine.script = script(THOUGHT + FINAL)
    hidden = await served.stream({**asking, "stream_options": {"include_obfuscation": True}}, PATH)
    lengths = {len(frame) % BLOCK for frame in hidden.split(b"\n\n") if b"choices" in frame}
    chunks = [{**chunk, "id": "", "created": 0} for chunk in chunks_of(hidden)]
    assert len(lengths) == 1
    assert all(isinstance(chunk.pop("obfuscation"), str) for chunk in chunks)
    assert chunks == [{**chunk, "id": "", "created": 0} for chunk in chunks_of(plain)]


async def test_last_answer_is_continued(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.script = script(" a time.<|return|>")
    messages: Any = [USER, {"role": "assistant", "content": "Once upon"}]
    answer = await sdk.chat.completions.create(
        model="tiny", messages=messages, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    )
    assert served.prompt_text().endswith("<|channel|>final<|message|>Once upon")
    assert answer.choices[0].message.content == " a time."


async def test_unknown_parameters_are_logged(served: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert (await served.post({**BODY, "brand_new": 1}, PATH))[0] == 200
        call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "y": 1}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": [], "x": 1}
        result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a", "z": 1}]}
        assert (await served.post({**BODY, "messages": [USER, answer, result]}, PATH))[0] == 200
    inner = "messages[1].x, messages[2].content[0].z, messages[1].tool_calls[0].function.y"
    expected = [f"Ignored unknown parameters: {unknown}" for unknown in ("brand_new", inner)]
    assert [line for line in caplog.messages if "Ignored" in line] == expected


async def test_parts_of_other_apis_are_read_as_vllm_reads_them(served: ScriptedServer) -> None:
    own = [
        {"role": "user", "content": [{"type": "text", "text": "One"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Two"}], "reasoning": "Hm."},
        USER,
    ]
    foreign = [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "output_text", "text": "Two", "annotations": []},
            ],
        },
        USER,
    ]
    for messages in (own, foreign):
        assert (await served.post({**BODY, "messages": messages}, PATH))[0] == 200
    assert served.engine.prompts[-1].token_ids == served.engine.prompts[-2].token_ids


@pytest.mark.parametrize("kind", ["input_text", "output_text", "input_image", "thinking", "nothing"])
async def test_a_part_without_its_content_is_refused(served: ScriptedServer, kind: str) -> None:
    status, answer = await served.post({**BODY, "messages": [{"role": "user", "content": [{"type": kind}]}]}, PATH)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")


async def test_image_parts_of_responses_are_those_of_chats(served: ScriptedServer) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
    _, foreign = await served.post({**BODY, "messages": [{"role": "user", "content": [image]}]}, PATH)
    own = {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "low"}}
    assert foreign == (await served.post({**BODY, "messages": [{"role": "user", "content": [own]}]}, PATH))[1]
