"""Completions over a real socket, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.cli.replayer import replay_of
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.services.runs.run import RunRegistry
from penstock.services.slots import Slots
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import RETURN, encoding_on_demand, load_encoding
from penstock.stages.optional.admit import Admit, Places
from penstock.stages.recordings.recordings import read_recordings
from penstock.stages.responses import recorded_stages, responses_pipeline
from tests.support.chat_streams import chunks_of
from tests.support.completion_streams import COMPLETIONS, heard
from tests.support.fake_vllm import FakeVllm, own_logprob, running_fakes
from tests.support.server import ENDLESS, ScriptedServer, running_server, script

PATH = "/v1/completions"
OUTPUT = " upon a time<|return|>"
BODY: dict[str, Any] = {"prompt": "Once"}
SCORES = (TokenLogprob(-0.25, ((11, -0.125),)), TokenLogprob(-0.5, ((13, -0.5),)))


async def test_openai_python_gets_the_same_text_whole_and_as_a_stream(
    served: ScriptedServer, sdk: openai.AsyncOpenAI
) -> None:
    served.engine.script = script(OUTPUT)
    whole = await sdk.completions.create(model="tiny", prompt="Once", seed=3)
    assert (whole.id[:5], whole.object, whole.choices[0].text) == ("cmpl-", "text_completion", " upon a time")
    assert (whole.choices[0].finish_reason, whole.usage and whole.usage.completion_tokens) == ("stop", 4)
    stream = await sdk.completions.create(model="tiny", prompt="Once", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " upon a time"
    [prompt, _] = served.engine.prompts
    assert (load_encoding().decode(prompt.token_ids), prompt.stop_token_ids) == ("Once", ())
    assert (prompt.facts.sampling.max_tokens, prompt.facts.sampling.seed) == (16, 3)


async def test_marks_of_a_prompt_are_special_tokens(served: ScriptedServer) -> None:
    """The client lays out the whole prompt, markup included."""
    for prompt in ("<|start|>user<|message|>Hi<|end|>", [200006, 1428, 200008, 12194, 200007]):
        assert (await served.post({"prompt": prompt}, PATH))[0] == 200
    assert len({prompt.token_ids for prompt in served.engine.prompts}) == 1


@pytest.mark.parametrize("prompt", [["Once", "Twice"], [[23374], [142, 1022]]])
async def test_several_prompts_are_several_choices(served: ScriptedServer, prompt: Any) -> None:
    served.engine.script = script(OUTPUT)
    body = {"prompt": prompt, "n": 2}
    status, whole = await served.post(body, PATH)
    assert (status, [choice["index"] for choice in whole["choices"]]) == (200, [0, 1, 2, 3])
    tokens = [prompt.token_ids for prompt in served.engine.prompts]
    assert sorted(tokens) == sorted(2 * [*set(tokens)])
    expected = sum(map(len, set(tokens)))
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (expected, 16)
    stream = await served.stream({**body, "stream_options": {"include_usage": True}}, PATH)
    assert {**heard(stream), "id": "", "created": 0} == {**whole, "id": "", "created": 0}
    assert len({chunk["id"] for chunk in chunks_of(stream)}) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_each_chunk_may_have_the_usage_so_far(served: ScriptedServer, n: int) -> None:
    served.engine.script = script(OUTPUT)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Once", "n": n}
    *chunks, last = chunks_of(await served.stream({**body, "stream_options": options}, PATH))
    for choice in range(n):
        usages = [each["usage"] for each in chunks if each["choices"][0]["index"] == choice]
        counts = [usage["completion_tokens"] for usage in usages]
        assert (counts[0], counts) == (1, sorted(counts))
        assert counts[-1] * n == last["usage"]["completion_tokens"]
        assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    for given in ({**options, "continuous_usage_stats": False}, {**options, "include_usage": False}):
        *chunks, _ = chunks_of(await served.stream({**body, "stream_options": given}, PATH))
        assert not any(chunk.get("usage") for chunk in chunks)


async def test_log_probabilities_of_the_prompt_are_those_of_the_engine(served: ScriptedServer) -> None:
    """An evaluation sums those between the end of the context and the one token that is generated."""
    served.engine.script = Script((RETURN,), logprobs=SCORES)
    body = {"prompt": [[11, 12, 13]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    status, whole = await served.post(body, PATH)
    [choice] = whole["choices"]
    names = [load_encoding().decode([token]) for token in (11, 12, 13, RETURN)]
    assert (status, choice["text"], choice["logprobs"]["tokens"]) == (200, "".join(names[:3]), names)
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5, -0.25]
    assert choice["logprobs"]["top_logprobs"][:3] == [None, {names[1]: -0.25, names[0]: -0.125}, {names[2]: -0.5}]
    assert heard(await served.stream(body, PATH))["choices"] == whole["choices"]
    assert served.engine.prompts[0].facts.sampling.prompt_logprobs == 1


async def test_prompt_alone_is_an_answer(served: ScriptedServer) -> None:
    served.engine.script = Script((11, 12), logprobs=SCORES)
    body = {"prompt": "Once upon", "max_tokens": 0, "echo": True}
    for logprobs, count in ((None, None), (0, 2)):
        _, whole = await served.post({**body, "logprobs": logprobs}, PATH)
        [choice] = whole["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
        assert count == (choice["logprobs"] and len(choice["logprobs"]["tokens"]))
        assert whole["usage"]["completion_tokens"] == 0


class Blind(ScriptedEngine):
    """An engine that does not score prompts."""

    def __getattribute__(self, name: str) -> Any:
        if name == "scores_prompts":
            raise AttributeError(name)
        return super().__getattribute__(name)


async def test_engine_that_scores_no_prompts_refuses_to(tmp_path: Path) -> None:
    async with running_server(Blind(script(OUTPUT)), tmp_path) as served:
        assert (await served.post({**BODY, "echo": True}, PATH))[0] == 200
        status, answer = await served.post({**BODY, "echo": True, "logprobs": 1}, PATH)
    assert (status, answer["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize("scale_out", [True, False])
async def test_engine_over_http_continues_and_scores_prompts(tmp_path: Path, scale_out: bool) -> None:
    vllm = FakeVllm(tokens=(11, 12, 13), scale_out=scale_out)
    async with running_fakes(vllm), AsyncExitStack() as closing:
        engine = await start_vllm_http([vllm.url])
        closing.push_async_callback(engine.close)
        served = await closing.enter_async_context(running_server(engine, tmp_path))
        status, whole = await served.post({"prompt": [5, 6], "echo": True, "ignore_eos": True}, PATH)
        assert (status, whole["choices"][0]["text"]) == (200, load_encoding().decode([5, 6, 11, 12, 13]))
        sent = vllm.prompts[-1]
        assert (sent.get("token_ids") or sent["prompt"]) == [5, 6]
        assert {"ignore_eos": True, "stop_token_ids": []}.items() <= (sent.get("sampling_params") or sent).items()
        body = {"prompt": [5, 6], "echo": True, "logprobs": 1}
        status, scored = await served.post(body, PATH)
        assert (status, scored["choices"][0]["text"]) == (200, whole["choices"][0]["text"])
        logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs == [None, *map(own_logprob, (6, 11, 12, 13))]
        assert heard(await served.stream(body, PATH))["choices"] == scored["choices"]


async def test_a_client_that_leaves_frees_the_engine_of_all_choices(served: ScriptedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 10_000}
    async with served.client.post(served.url + PATH, json=body) as answer:
        await answer.content.readline()
        assert served.engine.running == 4
    await served.wait_until_idle()
    assert served.engine.aborted == 4


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_refusal_before_the_answer_is_a_status(served: ScriptedServer, prompt: Any) -> None:
    served.engine.script = script(refusal=EngineOverloaded("It is full."))
    for stream in (False, True):
        status, answer = await served.post({"prompt": prompt, "stream": stream}, PATH)
        assert (status, answer["error"]["message"]) == (503, "It is full.")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_fault_in_the_middle_is_the_last_event(served: ScriptedServer, prompt: Any) -> None:
    served.engine.script = script(OUTPUT, error=EngineFailed("It broke."))
    status, answer = await served.post({"prompt": prompt}, PATH)
    assert (status, answer["error"]["message"]) == (500, "It broke.")
    chunks = chunks_of(await served.stream({"prompt": prompt}, PATH))
    assert [chunk["error"]["message"] for chunk in chunks if "error" in chunk] == ["It broke."]
    assert "error" in chunks[-1]
    await served.wait_until_idle()


async def test_openai_python_raises_a_fault(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    served.engine.script = script(OUTPUT, error=EngineFailed("It broke."))
    with pytest.raises(openai.APIError, match="It broke"):
        async for _ in await sdk.completions.create(model="tiny", prompt="Hi", stream=True):
            pass


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"prompt": "long " * 9_000}, 400, "prompt"),
        ({"prompt": [1] * 9_000}, 400, "prompt"),
        ({"prompt": ["Hi", "long " * 9_000]}, 400, "prompt"),
        ({"prompt": [2**30]}, 400, "prompt"),
        ({"include_stop_str_in_output": True}, 400, "include_stop_str_in_output"),
    ],
)
async def test_what_later_stages_refuse_is_named_as_in_the_body(
    served: ScriptedServer, fields: dict[str, Any], status: int, param: str
) -> None:
    served.engine.context_length = 8192
    answered, answer = await served.post({**BODY, **fields}, PATH)
    assert (answered, answer["error"]["param"]) == (status, param)


async def test_parameters_of_the_engine_reach_it(served: ScriptedServer) -> None:
    body = {**BODY, "ignore_eos": True, "top_k": 3, "min_tokens": 2, "stop_token_ids": [7]}
    assert (await served.post(body, PATH))[0] == 200
    sampling = served.engine.prompts[0].facts.sampling
    assert (sampling.ignore_eos, sampling.top_k, sampling.min_tokens, sampling.stop_token_ids) == (True, 3, 2, (7,))


async def test_a_stop_text_is_named(served: ScriptedServer) -> None:
    served.engine.script = script(OUTPUT)
    _, whole = await served.post({**BODY, "stop": [" time", "?"]}, PATH)
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" upon a", "stop", " time")


async def test_more_prompts_than_places_are_answered(tmp_path: Path) -> None:
    """Requests that have a place give it up only at their end, which must not wait for the others to begin."""

    def admitting(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        runs = pipeline.stage("persist").runs
        places = Places(Slots(2))
        admit = Admit(lambda _: places, runs.is_accepted, lambda _: None)
        return pipeline.insert_before("generate", "admit", admit)

    engine = ScriptedEngine(script("la " * 40))
    async with running_server(engine, tmp_path, edit=admitting) as served:
        body = {"prompt": [str(number) for number in range(9)], "max_tokens": 40}
        status, whole = await served.post(body, PATH)
        assert (status, len(whole["choices"])) == (200, 9)
        assert heard(await served.stream(body, PATH))["choices"] == whole["choices"]


async def test_prompts_count_as_responses_of_their_key(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(responses=2)}
    async with running_server(ScriptedEngine(script(OUTPUT)), tmp_path, admission=admission) as served:
        assert (await served.post({"prompt": ["a", "b"]}, PATH))[0] == 200
        served.engine.script = script(ENDLESS, endless=True, latency=0.01)
        status, answer = await served.post({"prompt": ["a", "b", "c"], "max_tokens": 10_000}, PATH)
        await served.wait_until_idle()
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_metrics_name_the_api(served: ScriptedServer) -> None:
    await served.stream(BODY, PATH)
    async with served.client.get(f"{served.url}/metrics") as answer:
        assert 'api="completions"' in await answer.text()


async def test_nothing_is_stored(served: ScriptedServer) -> None:
    _, answer = await served.post(BODY, PATH)
    assert (await served.get(f"/v1/responses/{answer['id'].replace('cmpl-', 'resp_')}"))[0] == 404


async def test_a_recording_has_all_that_the_answer_came_from(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", pause=0.01)
    body = {**BODY, "echo": True, "logprobs": 1}
    engine = ScriptedEngine(Script(load_encoding().encode_markup(OUTPUT), logprobs=SCORES))
    async with AsyncExitStack() as closing:
        closing.push_async_callback(recorder.close)
        served: ScriptedServer = await closing.enter_async_context(
            running_server(engine, tmp_path, edit=recorder.tapped)
        )
        status, whole = await served.post(body, PATH)
        assert status == 200
        await asyncio.sleep(0.1)
    [folder] = (tmp_path / "recordings").iterdir()
    assert json.loads((folder / "request.json").read_bytes())["prompt"] == "Once"
    for since in ("parse", "render"):
        replayed = (await replay_of(folder, since)).trace.after("persist")
        assert await answered(replayed.frames, body) == whole
    model = recorded_stages(encoding_on_demand(), read_recordings(folder))
    pipeline = responses_pipeline(model, ScriptedEngine(), RunRegistry(Store(NullDatabase())))
    for prompt, is_recorded in (("Once", True), ("Twice", False)):
        request = COMPLETIONS.read(json.dumps({**body, "prompt": prompt}).encode()).request
        async with pipeline.open(source_of([request])) as source:
            if is_recorded:
                again = await answered([event async for event in source], body)
                assert again["choices"] == whole["choices"]
            else:
                with pytest.raises(Exception, match="No recording answers"):
                    await anext(source)


async def answered(events: list[ResponseEvent], body: dict[str, Any]) -> Any:
    """The body of an answer with these events."""
    wire = COMPLETIONS.read(json.dumps(body).encode()).wire
    async with wire.translated(source_of(events)) as chunks:
        return json.loads(wire.json(await wire.fold(chunks)))
