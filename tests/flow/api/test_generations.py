"""The generations of an answer, in every API: tokens, their log probabilities, and the versions of the weights."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from penstock.pipeline.frames import TokenChunk, TokenIds, TokenLogprob
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.tools import Toolbox
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.chat_streams import chunks_of
from tests.support.chat_templates import model_with_images
from tests.support.fixture_cases import ONE_TURN_CASES, handwritten_logprobs, recorded_tokens
from tests.support.messages import events_of
from tests.support.scripted_tools import ScriptedTool
from tests.support.server import HELLO, PacedEngine, ScriptedServer, running_server, script
from tests.support.socket_client import connected

Json: TypeAlias = Any

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER: Json = {"role": "user", "content": "Hi"}
TOKENS: Json = {"return_token_ids": True}
WEIGHTS: Json = {"return_weight_versions": True}
BODIES: Mapping[str, Json] = {
    "/v1/responses": {"input": "Hi"},
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1_000},
    MESSAGES: {"model": "tiny", "messages": [USER], "max_tokens": 1_000},
}
SCORED: Mapping[str, Json] = {
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
    CHAT: {"logprobs": True},
    COMPLETIONS: {"logprobs": 0},
    MESSAGES: {"logprobs": True},
}
SEARCH: Mapping[str, Json] = {
    "/v1/responses": {"tools": [{"type": "web_search"}]},
    CHAT: {"web_search_options": {}},
    MESSAGES: {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
}
SEARCHES = (
    '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=browser.search code<|message|>{"query":"x"}<|call|>'
)

Ask: TypeAlias = Callable[[ScriptedServer, str, Json], Awaitable[Json]]
"""Ask a server at a path, and return the whole answer."""


async def at_once(served: ScriptedServer, path: str, more: Json) -> Json:
    status, answer = await served.post({**BODIES[path], **more}, path)
    assert status == 200, answer
    return answer


async def streamed(served: ScriptedServer, path: str, more: Json) -> Json:
    sent = await served.stream({**BODIES[path], **more, "stream": True}, path)
    if path == "/v1/responses":
        return last_response(sent)
    if path == MESSAGES:
        (ending,) = (event for event in events_of(sent) if event["type"] == "message_delta")
        return ending["delta"]
    pieces = [(chunk, choice) for chunk in chunks_of(sent) for choice in chunk["choices"]]
    (*_, (_, last)) = pieces
    whole: Json = {**last, "token_ids": [], "logprobs": None}
    prompts = [each["prompt_token_ids"] for pair in pieces for each in pair if "prompt_token_ids" in each]
    for _, choice in pieces:
        whole["token_ids"] += choice.get("token_ids", ())
        for name, found in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = [*whole["logprobs"].get(name, ()), *(found or ())]
    return {"choices": [whole]} | ({"prompt_token_ids": prompts[0]} if prompts else {})


def last_response(sent: bytes) -> Json:
    (*_, last) = (line for line in sent.decode().splitlines() if line.startswith("data: {"))
    return json.loads(last.removeprefix("data: "))["response"]


async def over_a_socket(served: ScriptedServer, path: str, more: Json) -> Json:
    async with connected(served) as client:
        await client.send(**BODIES[path], **more)
        while (frame := await client.frame())["type"] not in ("response.completed", "response.incomplete"):
            pass
    return frame["response"]


async def in_the_background(served: ScriptedServer, path: str, more: Json) -> Json:
    return await served.wait_for_end(await served.start_background({**BODIES[path], **more}))


async def retrieved(served: ScriptedServer, path: str, more: Json) -> Json:
    return await served.get_response((await at_once(served, path, more))["id"])


async def resumed(served: ScriptedServer, path: str, more: Json) -> Json:
    return last_response(await served.replay((await at_once(served, path, more))["id"], "&starting_after=3"))


WAYS: Sequence[tuple[str, Ask]] = (
    *((path, ask) for path in BODIES for ask in (at_once, streamed)),
    *(("/v1/responses", ask) for ask in (over_a_socket, in_the_background, retrieved, resumed)),
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ScriptedServer]:
    toolbox = Toolbox({"browser": ScriptedTool()})
    async with running_server(ScriptedEngine(), tmp_path, toolbox=toolbox) as server:
        yield server


def generations_of(answer: Json) -> Json:
    """The generations of an answer, also of one in vLLM's form."""
    if "choices" not in answer:
        return answer["generations"]
    (choice,) = answer["choices"]
    if "generations" in choice:
        return choice["generations"]
    found = {name: choice[name] for name in ("prompt_token_ids", "token_ids", "weight_versions") if name in choice}
    if "prompt_token_ids" in answer:
        found["prompt_token_ids"] = answer["prompt_token_ids"]
    if choice["logprobs"]:
        listed = choice["logprobs"].get("content")
        scores = choice["logprobs"]["token_logprobs"] if listed is None else [each["logprob"] for each in listed]
        found["logprobs"] = scores
    return [found]


def numbers(logprobs: Sequence[TokenLogprob]) -> list[float]:
    return [each.logprob for each in logprobs]


def tokens_of(case: Path) -> TokenIds:
    chunks = [frame for frame in recorded_tokens(case) if isinstance(frame, TokenChunk)]
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.mark.parametrize(("path", "ask"), WAYS)
@pytest.mark.parametrize("scored", [False, True])
async def test_generations_are_the_recorded_tokens(served: ScriptedServer, path: str, ask: Ask, scored: bool) -> None:
    for number, case in enumerate(ONE_TURN_CASES):
        written = tokens_of(case)
        logprobs = handwritten_logprobs([*written], 1)
        served.engine.script = Script(written, chunk_size=1 + number % 7, logprobs=logprobs)
        served.engine.prompts.clear()
        answer = await ask(served, path, TOKENS | (SCORED[path] if scored else {}))
        shown = scored and (written or path not in (CHAT, COMPLETIONS))  # vLLM's form has null for none
        output = {"token_ids": [*written], **({"logprobs": numbers(logprobs)} if shown else {})}
        prompts = [[*prompt.token_ids] for prompt in served.engine.prompts]  # several if a call has to be refused
        assert generations_of(answer) == [{"prompt_token_ids": prompt, **output} for prompt in prompts], case.name


@pytest.mark.parametrize("chunk_size", [1, 3, 1_000])
async def test_chat_model_has_its_generation(tmp_path: Path, chunk_size: int) -> None:
    chat = model_with_images(sees=False)
    written = chat.vocabulary.encode("<think>\nHm, a café.\n</think>\n\nHello there.<|im_end|>")
    logprobs = tuple(TokenLogprob(-at / 8) for at in range(len(written)))
    engine = ScriptedEngine(Script(written, chunk_size=chunk_size, logprobs=logprobs))
    async with running_server(engine, tmp_path, model=chat) as server:
        for path, ask in WAYS:
            for scores in ({}, {"logprobs": numbers(logprobs)}):
                answer = await ask(server, path, TOKENS | (SCORED[path] if scores else {}))
                prompt = [*engine.prompts[-1].token_ids]
                assert generations_of(answer) == [{"prompt_token_ids": prompt, "token_ids": [*written], **scores}]


@pytest.mark.parametrize(("path", "ask"), [way for way in WAYS if way[0] in SEARCH])
async def test_each_turn_is_a_generation(served: ScriptedServer, path: str, ask: Ask) -> None:
    spans = [(WeightSpan("a", 0, 3), WeightSpan("b", 3, 99)), (WeightSpan("b", 0, 99),)]
    scripts = [script(SEARCHES, chunk_size=3), script(HELLO, chunk_size=2)]
    served.engine.turns = [
        replace(each, logprobs=handwritten_logprobs([*each.token_ids], 1), weights=span)
        for each, span in zip(scripts, spans, strict=True)
    ]
    answer = await ask(served, path, TOKENS | WEIGHTS | SCORED[path] | SEARCH[path])
    lengths = [len(each.token_ids) for each in scripts]
    versions = [[("a", 0, 3), ("b", 3, lengths[0])], [("b", 0, lengths[1])]]
    assert generations_of(answer) == [
        {
            "prompt_token_ids": [*prompt.token_ids],
            "token_ids": [*each.token_ids],
            "logprobs": numbers(each.logprobs),
            "weight_versions": [dict(zip(("version", "start", "end"), span, strict=True)) for span in own],
        }
        for prompt, each, own in zip(served.engine.prompts[-2:], served.engine.turns, versions, strict=True)
    ]


@pytest.mark.parametrize(("path", "ask"), WAYS)
async def test_versions_come_without_tokens(served: ScriptedServer, path: str, ask: Ask) -> None:
    served.engine.script = replace(script(HELLO), weights=(WeightSpan("step-7", 0, 2), WeightSpan("step-8", 2, 4)))
    first, second = ({"version": "step-7", "start": 0, "end": 2}, {"version": "step-8", "start": 2, "end": 4})
    found = generations_of(await ask(served, path, WEIGHTS))
    assert [each["weight_versions"] for each in found] == [[first, second]]
    served.engine.script = script(HELLO)  # an engine that names no version, which vLLM then leaves out
    assert "weight_versions" not in json.dumps(await ask(served, path, WEIGHTS))


@pytest.mark.parametrize(("path", "ask"), WAYS)
async def test_nothing_comes_unasked(served: ScriptedServer, path: str, ask: Ask) -> None:
    served.engine.script = replace(
        script(HELLO), weights=(WeightSpan("step-7", 0, 99),), logprobs=(TokenLogprob(-1.0),)
    )
    for more in ({}, SCORED[path] if path != MESSAGES else {}, {"return_token_ids": False}):
        answer = json.dumps(await ask(served, path, more))
        assert not [name for name in ("generations", "weight_versions", "prompt_token_ids") if name in answer]


async def test_stop_text_ends_the_generation(served: ScriptedServer) -> None:
    served.engine.script = replace(
        script("<|channel|>final<|message|>One two three four", chunk_size=50),
        logprobs=(TokenLogprob(-1.0),),
        weights=(WeightSpan("a", 0, 99),),
    )
    more = TOKENS | WEIGHTS | SCORED["/v1/responses"] | {"stop": "two"}
    (found,) = generations_of(await at_once(served, "/v1/responses", more))
    assert load_encoding().decode(found["token_ids"]) == "<|channel|>final<|message|>One two"
    assert len(found["logprobs"]) == found["weight_versions"][-1]["end"] == len(found["token_ids"])


@pytest.mark.parametrize("background", [False, True])
async def test_cancelled_response_has_the_tokens_until_then(tmp_path: Path, background: bool) -> None:
    engine = PacedEngine(script(HELLO))
    engine.hold(4)
    body = {"input": "Hi", "stream": True, "background": background, **TOKENS}
    async with running_server(engine, tmp_path) as server, server.open_stream(body) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"reasoning_text.delta")
        status, cancelled = await server.cancel(response_id)
        assert status == 200
        stored = await server.get_response(response_id)
        sent = last_response(await stream.rest()) if background else stored
    expected = {"prompt_token_ids": [*engine.prompts[0].token_ids], "token_ids": [*engine.script.token_ids[:4]]}
    assert cancelled["generations"] == stored["generations"] == sent["generations"] == [expected]


async def test_failed_response_has_the_tokens_until_then(served: ScriptedServer) -> None:
    served.engine.script = script(HELLO, error=RuntimeError("no GPU"))
    answer = await streamed(served, "/v1/responses", TOKENS)
    assert (answer["status"], answer["generations"][0]["token_ids"]) == ("failed", [*served.engine.script.token_ids])


async def test_each_choice_has_its_versions(served: ScriptedServer) -> None:
    served.engine.script = replace(script(HELLO), weights=(WeightSpan("a", 0, 2),))
    for path in (CHAT, COMPLETIONS):
        answer = await at_once(served, path, WEIGHTS | {"n": 2})
        versions = [{"version": "a", "start": 0, "end": 2}]
        assert [choice["weight_versions"] for choice in answer["choices"]] == [versions, versions]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, TOKENS | {"store": True}, "return_token_ids"),
        (MESSAGES, {"logprobs": True}, "logprobs"),
        *((path, {name: "yes"}, name) for path in BODIES for name in ("return_token_ids", "return_weight_versions")),
    ],
)
async def test_wrong_wish_is_refused(served: ScriptedServer, path: str, more: Json, param: str) -> None:
    status, answer = await served.post({**BODIES[path], **more}, path)
    assert (status, param in json.dumps(answer["error"])) == (400, True), answer


async def test_line_of_a_batch_has_its_generations(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(HELLO))
    async with running_server(engine, tmp_path, resources=["files", "batches"]) as server:
        one: Json = {"custom_id": "a", "params": BODIES[MESSAGES] | TOKENS}
        status, batch = await server.post({"requests": [one]}, "/v1/messages/batches")
        assert status == 200, batch
        while (await server.get(f"/v1/messages/batches/{batch['id']}"))[1]["processing_status"] != "ended":
            pass
        async with server.client.get(f"{server.url}/v1/messages/batches/{batch['id']}/results") as results:
            (line,) = (await results.text()).splitlines()
    (found,) = json.loads(line)["result"]["message"]["generations"]
    assert found["token_ids"] == [*engine.script.token_ids]
