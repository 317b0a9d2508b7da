"""The HTTP edge, from real sockets down to a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import openai
import pytest

from pipeline.core import Pipeline
from pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt
from pipeline.protocol.events import OutputTextDelta, ResponseEvent
from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import HarmonyEncoding
from tests.serving import Served, serving
from tests.streams import final, read_sse

Scripted: TypeAlias = Served[ScriptedEngine]

HELLO = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    ' <|constrain|>json<|message|>{"city":"Paris"}<|call|>'
)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def script(encoding: HarmonyEncoding, text: str = HELLO, **options: Any) -> Script:
    return Script(encoding.encode_markup(text), **options)


@pytest.fixture
async def served(encoding: HarmonyEncoding, tmp_path: Path) -> AsyncGenerator[Scripted, None]:
    async with serving(ScriptedEngine(script(encoding)), encoding, tmp_path) as served:
        yield served


# One path, two consumers


async def test_a_stream_is_whole(served: Scripted) -> None:
    """A streamed response keeps every rule of the wire, down to its bytes."""
    response = final(read_sse(await served.stream({"input": "Hi"})))
    assert response.status == "completed"
    assert [getattr(item, "text", "") for item in response.output] == ["A greeting.", "Hello!"]
    assert response.usage is not None
    assert response.usage.output_tokens == len(served.engine.script.token_ids)
    assert response.usage.input_tokens == len(served.engine.prompts[0].token_ids)


async def test_without_stream_the_answer_is_the_last_response(served: Scripted) -> None:
    """The JSON answer is what the stream's terminal event carries."""
    status, answer = await served.post({"input": "Hi"})
    streamed = final(read_sse(await served.stream({"input": "Hi"})))
    assert status == 200
    assert answer["status"] == "completed"
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == getattr(streamed.output[1], "text", None)


async def test_a_stored_response_is_found(served: Scripted) -> None:
    """GET gives what the terminal event gave, as soon as it was seen."""
    _, answer = await served.post({"input": "Hi"})
    assert await served.get(f"/v1/responses/{answer['id']}") == (200, answer)


async def test_store_false_keeps_nothing(served: Scripted) -> None:
    """A response that must not be stored is not found."""
    _, answer = await served.post({"input": "Hi", "store": False})
    status, error = await served.get(f"/v1/responses/{answer['id']}")
    assert (status, error["error"]["code"]) == (404, "response_not_found")


async def test_the_model_is_listed(served: Scripted) -> None:
    """Clients find the name to ask for."""
    status, models = await served.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in models["data"]] == ["tiny"]


# Bad input

BAD: list[tuple[Any, int, str | None, str]] = [
    (b"{", 400, None, "invalid_request"),
    (b"[]", 400, None, "invalid_request"),
    ({"input": 7}, 400, "input", "invalid_request"),
    ({"input": [{"type": "telepathy"}]}, 400, "input[0].type", "invalid_request"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text", ""),
    ({"input": "Hi", "temperature": "hot"}, 400, "temperature", "invalid_request"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        400,
        "input[0].call_id",
        "invalid_request",
    ),
    ({"input": "long " * 9_000}, 400, "input", "context_length_exceeded"),
    ({"input": "Hi", "model": "gpt-9"}, 404, "model", "model_not_found"),
    ({"input": "Hi", "previous_response_id": "resp_0"}, 400, "previous_response_id", "previous_response_not_found"),
    ({"input": "x" * 200_000}, 413, None, "request_too_large"),
    ({"input": "Hi", "background": True}, 400, "background", "unsupported_parameter"),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), BAD)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused(
    body: Any, status: int, param: str | None, code: str, stream: bool, served: Scripted
) -> None:
    """Bad input is a 4xx with OpenAI's error body, before any header of a stream."""
    served.engine.context_length = 8192
    wanted = {**body, "stream": stream} if isinstance(body, dict) else body
    answered, answer = await served.post(wanted)
    assert answered == status
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == (code or "invalid_request")
    assert served.engine.running == 0


async def test_unknown_routes_answer_in_json(served: Scripted) -> None:
    """A wrong path or method has the error body that clients read."""
    for path, status in (("/v2/nothing", 404), ("/v1/responses", 405), ("/v1/responses/resp_0", 404)):
        answered, answer = await served.get(path)
        assert answered == status
        assert answer["error"]["type"] == "invalid_request_error"
    status, answer = await served.get("/v1/responses/resp_0?stream=true")
    assert (status, answer["error"]["param"]) == (400, "stream")


# Engine faults

REFUSALS = [
    (InvalidPrompt("too odd"), 400, "invalid_prompt"),
    (EngineOverloaded("full"), 503, "rate_limit_exceeded"),
    (EngineDead("gone"), 503, "server_error"),
]


@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS, ids=str)
async def test_what_the_engine_refuses_is_a_status(refusal: Any, status: int, code: str, served: Scripted) -> None:
    """As long as the engine has not accepted the prompt, its refusal is an HTTP status."""
    served.engine.script = Script(refusal=refusal)
    answered, answer = await served.post({"input": "Hi", "stream": True})
    assert (answered, answer["error"]["code"]) == (status, code)


@pytest.mark.parametrize("error", [EngineDead("The engine has died."), EngineFailed("It failed."), ValueError("a bug")])
async def test_v6_a_fault_in_mid_stream_is_one_failed_event(
    error: Exception, served: Scripted, encoding: HarmonyEncoding
) -> None:
    """A fault after the headers ends in exactly one response.failed, which is stored (defects 11, 12, V6)."""
    served.engine.script = script(encoding, HELLO.removesuffix("<|return|>"), error=error, dies=False)
    response = final(read_sse(await served.stream({"input": "Hi"})))
    assert response.status == "failed"
    assert response.error is not None
    assert "bug" not in response.error.message
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert (await served.get(f"/v1/responses/{response.id}"))[1]["status"] == "failed"


async def test_health_tells_that_the_engine_died(served: Scripted, encoding: HarmonyEncoding) -> None:
    """Health is 200 while the engine lives, and 503 from its death on; later requests are 503 too."""
    assert await served.get("/health") == (200, {"status": "ok"})
    served.engine.script = script(encoding, error=EngineDead("The engine has died."), dies=True)
    assert final(read_sse(await served.stream({"input": "Hi"}))).status == "failed"
    assert (await served.get("/health"))[0] == 503
    assert (await served.post({"input": "Hi"}))[0] == 503


async def test_without_stream_a_fault_is_a_failed_response(served: Scripted, encoding: HarmonyEncoding) -> None:
    """A response that fails after it began is answered as a response with status failed."""
    served.engine.script = script(encoding, error=EngineFailed("It failed."))
    status, answer = await served.post({"input": "Hi"})
    assert (status, answer["status"], answer["error"]["message"]) == (200, "failed", "It failed.")


async def break_at_text(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    async for event in source:
        if isinstance(event, OutputTextDelta):
            raise ZeroDivisionError
        yield event


async def test_a_stage_behind_emit_that_breaks_ends_the_stream(encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """Even where emit can no longer help, the stream has one terminal event and [DONE]."""

    def broken(pipeline: Pipeline[Any, ResponseEvent]) -> Pipeline[Any, ResponseEvent]:
        return pipeline.then("broken", break_at_text)

    async with serving(ScriptedEngine(script(encoding)), encoding, tmp_path, edit=broken) as served:
        body = await served.stream({"input": "Hi"})
    response = final(read_sse(body))
    assert response.status == "failed"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert b"ZeroDivision" not in body


# Clients that leave, and silence


async def test_a_client_that_leaves_aborts_the_engine(served: Scripted, encoding: HarmonyEncoding) -> None:
    """Closing the connection ends the generation within moments (defect 31)."""
    served.engine.script = script(encoding, "<|channel|>final<|message|>" + "la " * 50, endless=True, latency=0.001)
    answer = await served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True})
    await answer.content.readline()
    assert served.engine.running == 1
    answer.close()
    await asyncio.wait_for(until_idle(served), 5)
    assert served.engine.aborted == 1


async def test_a_client_that_leaves_before_the_first_event(served: Scripted) -> None:
    """The same before any header, and without streaming."""
    served.engine.script = Script(token_ids=[5], endless=True, latency=0.01)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(served.post({"input": "Hi"}), 0.3)
    await asyncio.wait_for(until_idle(served), 5)
    assert served.engine.aborted == 1


async def until_idle(served: Scripted) -> None:
    while served.engine.running:
        await asyncio.sleep(0.01)


async def test_silence_is_broken_by_comments(encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """A stream that says nothing for a while sends comments between whole events."""
    slow = ScriptedEngine(script(encoding, latency=0.12, chunk_size=8))
    async with serving(slow, encoding, tmp_path, keep_alive=0.05) as served:
        body = await served.stream({"input": "Hi"})
    assert body.count(b": keep-alive\n\n") >= 2
    assert final(read_sse(body)).status == "completed"


# Stopping


async def test_stopping_ends_every_stream_in_good_order(served: Scripted, encoding: HarmonyEncoding) -> None:
    """What runs when the server stops ends as failed, stored and told; what comes then is turned away."""
    served.engine.script = script(encoding, "<|channel|>final<|message|>" + "la " * 50, endless=True, latency=0.005)
    reading = asyncio.create_task(served.stream({"input": "Hi"}))
    while not served.engine.running:
        await asyncio.sleep(0.01)
    await served.api.admission.finish(0.1)
    assert (await served.post({"input": "Hi"}))[0] == 503
    await served.engine.stop()
    await served.api.admission.finish(2)
    assert served.api.admission.running == 0
    response = final(read_sse(await reading))
    assert response.status == "failed"
    assert (await served.get(f"/v1/responses/{response.id}"))[1]["status"] == "failed"


async def test_a_body_that_cannot_be_unpacked_is_refused(served: Scripted) -> None:
    """A body that lies about its encoding is the client's mistake, not ours."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with served.client.post(f"{served.url}/v1/responses", data=b"no gzip", headers=headers) as answer:
        assert answer.status == 400
        assert "body" in (await answer.json())["error"]["message"]


# The SDK


@pytest.fixture
async def sdk(served: Scripted) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_stream_helper_accumulates(served: Scripted, sdk: openai.AsyncOpenAI) -> None:
    """openai-python's stream helper gets through a stream and ends with its final response (defect 2)."""
    async with sdk.responses.stream(model="tiny", input="Hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        response = await stream.get_final_response()
    assert "".join(deltas) == response.output_text == "Hello!"


async def test_a_function_call_makes_the_round(
    served: Scripted, sdk: openai.AsyncOpenAI, encoding: HarmonyEncoding
) -> None:
    """Call, output and answer travel by previous_response_id; the prompt holds all of them (defect 19)."""
    served.engine.script = script(encoding, CALL)
    tools: Any = [WEATHER]
    first = await sdk.responses.create(model="tiny", input="Weather?", tools=tools)
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris"}
    served.engine.script = script(encoding)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}]
    second = await sdk.responses.create(model="tiny", previous_response_id=first.id, input=output, tools=tools)
    assert second.output_text == "Hello!"
    prompt = encoding.decode(served.engine.prompts[-1].token_ids)
    assert prompt.endswith(
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>Look it up.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>18 degrees<|end|>"
        "<|start|>assistant"
    )


async def test_errors_are_the_sdks_own(served: Scripted, sdk: openai.AsyncOpenAI) -> None:
    """The SDK raises its own exception types, with param and code."""
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve("resp_0")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="tiny", input="Hi", previous_response_id="resp_0")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
