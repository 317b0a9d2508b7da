"""vLLM in this process, with a real model: the engine adapter, and the recorded fixtures."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.pipeline import errors, frames
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.items import Message, OutputText, Reasoning
from penstock.services.engines.vllm import UnknownModel, VllmEngine
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from penstock.stages.render.harmony.grammar import WARM_UP
from tests.support.engine_requests import (
    ON_SHARED_ENGINE,
    EngineStats,
    adapted,
    answer,
    prompt,
    rename,
    respond,
    sampled,
    scheduled,
    spoken,
    stoppable,
    until_idle,
)
from tests.support.event_streams import final, generate, last, logprobs, read_sse, run_stage, token_ids
from tests.support.fixture_cases import HARMONY_CASES, Case
from tests.support.processes import PATIENCE
from tests.support.server import running_server
from tests.support.tiny_engine import CONTEXT_LENGTH, QUEUE

pytestmark = ON_SHARED_ENGINE

BABBLE = "start: /[a-z]{60}/ <[200002]>"
"""A grammar for text that the tiny model was not trained on, so all of its tokens are uncertain."""

RECORDED = [case for case in HARMONY_CASES if not (case / "completion.txt").exists()]


@pytest.mark.parametrize("budget", [0, 1, 20])
async def test_thought_ends_after_its_budget(engine: VllmEngine, budget: int) -> None:
    response = await respond(engine, "Keep thinking without end.", thinking_token_budget=budget, max_output_tokens=100)
    first, *others = response.output
    assert isinstance(first, Reasoning)
    assert len(load_encoding().encode(first.text)) == budget
    assert others  # what they are is up to the model


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
async def test_greedy_tokens_equal_the_recording(
    folder: Path, engine: VllmEngine, request: pytest.FixtureRequest
) -> None:
    case = Case(folder, regen=bool(request.config.getoption("--regen")))
    sequence = await run_stage(Generate(engine), case.read("prompt.jsonl", frames.Prompt))
    if case.regen:
        case.write("tokens.jsonl", sequence)
    recorded = case.read("tokens.jsonl", frames.TokenFrame)
    assert token_ids(sequence) == token_ids(recorded)
    assert sequence[0] == recorded[0]
    assert isinstance(sequence[-1], frames.GenerationFinished)
    assert sequence[-1].reason == recorded[-1].reason


async def read_late(engine: VllmEngine, wanted: frames.Prompt) -> list[frames.EngineFrame]:
    """The frames of a reader that reads the first, then waits until the engine has generated all tokens."""
    async with engine.open(wanted) as stream:
        first = await anext(stream)
        await until_idle(engine)
        return [first, *[frame async for frame in stream]]


async def test_prompt_without_images_waits_for_no_thread_of_vllm(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(engine.llm.input_processor, "process_inputs_async")
    assert token_ids(await generate(engine, prompt("Count from 1 to 100.", max_tokens=5)))


async def test_slow_reader_gets_every_token(engine: VllmEngine) -> None:
    wanted = prompt("Count from 1 to 100.", max_tokens=500)
    quick, slow = await generate(engine, wanted), await read_late(engine, wanted)
    assert token_ids(quick) == token_ids(slow)
    assert [type(frame) for frame in slow] == [frames.TokenChunk, frames.TokenChunk, frames.GenerationFinished]


async def test_first_chunk_has_the_cached_tokens(engine: VllmEngine) -> None:
    wanted = prompt("Count from 1 to 100. " * 40, max_tokens=20)
    await generate(engine, wanted)
    first, *others, finished = await generate(engine, wanted)
    assert isinstance(first, frames.TokenChunk)
    assert isinstance(finished, frames.GenerationFinished)
    assert first.cached_tokens == finished.cached_tokens > 0
    assert not any(frame.cached_tokens for frame in others)


@pytest.mark.parametrize(
    ("sampling", "passed_on"),
    [({}, True), ({"logprobs": 0}, True), ({"logprobs": 1}, False), ({"stop": ("20 21",)}, True)],
    ids=str,
)
async def test_only_token_ids_and_their_own_logprobs_are_passed_on(
    engine: VllmEngine, sampling: dict[str, Any], passed_on: bool
) -> None:
    wanted = sampled(prompt("Count from 1 to 100."), **sampling)
    async with engine.open(wanted) as stream:
        await anext(stream)
        (reading,) = engine._running
        assert (reading.collector.request_id in engine._unread) == passed_on
        await until_idle(engine)
        assert bool(reading.unread) == passed_on
    assert not engine._unread


async def test_stopping_ends_running_generations(engine: VllmEngine, stats: EngineStats) -> None:
    ending = stoppable(engine)
    wanted = prompt("Never stop talking.", max_tokens=5000)
    tasks = [asyncio.create_task(generate(ending, rename(wanted, f"resp_{number}"))) for number in range(3)]
    await stats.until(lambda: stats.running == len(tasks))
    await ending.stop()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [errors.EngineFailed] * 3
    with pytest.raises(errors.ServerStopping):
        await generate(ending, wanted)
    await until_idle(engine)


async def test_impossible_prompts_never_reach_the_engine(engine: VllmEngine) -> None:
    good = prompt("Say hello.")
    for tokens, error in (
        ([5] * CONTEXT_LENGTH, errors.ContextTooLong),
        ([], errors.InvalidPrompt),
        ([5, VOCABULARY_SIZE], errors.InvalidPrompt),
        ([-1], errors.InvalidPrompt),
    ):
        bad = msgspec.structs.replace(good, token_ids=tuple(tokens))
        with pytest.raises(error):
            await anext(Generate(engine)(source_of([bad])))
    assert token_ids(await generate(engine, good))


async def test_refusal_of_vllm_is_an_invalid_prompt(engine: VllmEngine) -> None:
    refused = frames.with_facts(prompt("Say hello."), sampling=frames.Sampling(-1.0, 1.0, 10))
    with pytest.raises(errors.InvalidPrompt):
        await generate(engine, refused)


async def test_full_queue_is_overload(engine: VllmEngine, stats: EngineStats) -> None:
    wanted = prompt("Never stop talking.", max_tokens=5000)
    names = [f"resp_{number}" for number in range(QUEUE)]
    inside = [asyncio.create_task(generate(engine, rename(wanted, name))) for name in names]
    await stats.until(lambda: stats.running == QUEUE)
    with pytest.raises(errors.EngineOverloaded):
        await generate(engine, rename(wanted, "resp_outside"))
    before = stats.generated
    await stats.until(lambda: stats.generated > before + QUEUE)
    for name in names:
        assert await engine.cancel(name)
    assert {last(sequence).reason for sequence in await asyncio.gather(*inside)} == {"cancelled"}


# Sampling


async def test_logprobs_belong_to_their_tokens(engine: VllmEngine) -> None:
    sequence = await generate(engine, sampled(prompt("Say hello."), logprobs=5))
    reported = logprobs(sequence)
    assert len(reported) == len(token_ids(sequence))
    for token, logprob in zip(token_ids(sequence), reported, strict=True):
        values = [value for _, value in logprob.top]
        assert logprob.top[0] == (token, logprob.logprob)
        assert len({token for token, _ in logprob.top}) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.001


async def test_unlikely_token_has_its_own_logprob(engine: VllmEngine) -> None:
    wanted = msgspec.structs.replace(prompt("Say hello.", max_tokens=40), grammar=BABBLE)
    unlikely = 0
    for seed in range(1, 6):
        sequence = await generate(engine, sampled(wanted, temperature=2.0, seed=seed, logprobs=1))
        for token, logprob in zip(token_ids(sequence), logprobs(sequence), strict=True):
            [(likeliest, highest)] = logprob.top
            if token != likeliest:
                unlikely += 1
                assert logprob.logprob <= highest <= 0
    assert unlikely


async def test_logprobs_may_have_no_alternatives_or_be_absent(engine: VllmEngine) -> None:
    wanted = prompt("Say hello.")
    sequence = await generate(engine, sampled(wanted, logprobs=0))
    assert [logprob.top for logprob in logprobs(sequence)] == [()] * len(token_ids(sequence))
    assert logprobs(await generate(engine, wanted)) == []


async def test_logprobs_respect_a_grammar(engine: VllmEngine) -> None:
    wanted = sampled(prompt("Say hello.", max_tokens=40), logprobs=3)
    sequence = await generate(engine, msgspec.structs.replace(wanted, grammar='start: /[ab]{5}/ "c" <[200002]>'))
    reported = logprobs(sequence)
    assert len(reported) == len(token_ids(sequence))
    assert all(math.isfinite(value) for logprob in reported for _, value in logprob.top)
    assert all(token in dict(logprob.top) for token, logprob in zip(token_ids(sequence), reported, strict=True))
    assert len(reported[-1].top) == 1  # only the end may follow the c
    assert set(load_encoding().decode(token_ids(sequence)[:-1])) <= set("abc")


async def test_slow_reader_gets_every_logprob(engine: VllmEngine) -> None:
    sequence = await read_late(engine, sampled(prompt("Count from 1 to 100.", max_tokens=500), logprobs=3))
    assert [type(frame) for frame in sequence] == [frames.TokenChunk, frames.TokenChunk, frames.GenerationFinished]
    for token, logprob in zip(token_ids(sequence), logprobs(sequence), strict=True):
        assert logprob.top[0] == (token, logprob.logprob)
        assert len(logprob.top) == 3


async def test_too_many_alternatives_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(errors.InvalidRequest, match="21") as refused:
        await generate(engine, sampled(prompt("Say hello."), logprobs=21))
    assert refused.value.param == "top_logprobs"


async def test_seed_makes_sampling_repeatable(engine: VllmEngine) -> None:
    wanted = msgspec.structs.replace(prompt("Say hello.", max_tokens=40), grammar=BABBLE)
    wild = sampled(wanted, temperature=2.0)
    await generate(engine, wild)  # all later requests find the prompt in the cache, so they compute the same
    samples = [token_ids(await generate(engine, sampled(wild, seed=seed))) for seed in (1, 1, 2, 3, 4, 5)]
    assert samples[0] == samples[1]
    assert len(set(map(tuple, samples))) > 1


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
async def test_narrow_sampling_is_greedy(engine: VllmEngine, narrow: dict[str, Any]) -> None:
    wanted = prompt("Say hello.")
    wild = sampled(wanted, temperature=2.0, **narrow)
    assert token_ids(await generate(engine, wild)) == token_ids(await generate(engine, wanted))


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}], ids=str
)
async def test_penalties_change_the_output(engine: VllmEngine, penalty: dict[str, float]) -> None:
    wanted = adapted(prompt("Say hello.", max_tokens=100))
    without = token_ids(await generate(engine, wanted))
    assert len(set(without)) < len(without)
    assert token_ids(await generate(engine, sampled(wanted, **penalty))) != without


async def test_stop_text_is_left_to_the_parser(engine: VllmEngine) -> None:
    sequence = await generate(engine, sampled(prompt("Count from 1 to 100."), stop=("20 21", "nowhere")))
    assert "19 20 21 22" in load_encoding().decode(token_ids(sequence))


async def test_parameters_of_vllm_change_the_output(engine: VllmEngine) -> None:
    wanted = prompt("Say hello.")
    tokens = token_ids(await generate(engine, wanted))
    first, third = tokens[0], tokens[2]

    async def given(**sampling: Any) -> list[int]:
        return token_ids(await generate(engine, sampled(wanted, **sampling)))

    assert await given(stop_token_ids=(third,)) == tokens[: tokens.index(third) + 1]
    assert (await given(logit_bias={first: -100.0}))[0] != first
    assert set(await given(allowed_token_ids=(first, third), max_tokens=20)) <= {first, third}
    assert len(await given(min_tokens=len(tokens) + 5)) > len(tokens)
    answered = load_encoding().decode(tokens)
    word = max(re.findall(" ([a-z]+)", answered.rpartition("<|message|>")[2]), key=len)
    assert word not in load_encoding().decode(await given(bad_words=(word,))).rpartition("<|message|>")[2]
    for invalid in ({"logit_bias": {10**8: 1.0}}, {"allowed_token_ids": (10**8,)}):
        with pytest.raises(errors.InvalidPrompt, match="vocab") as refused:
            await given(**invalid)
        assert refused.value.param in invalid


async def test_stop_text_is_cut_off(engine: VllmEngine) -> None:
    response = await respond(engine, "Count from 1 to 100.", stop=["20 21"])
    assert response.status == "completed"
    assert answer(response).endswith("18 19 ")


# Scheduling


async def test_salt_separates_caches(engine: VllmEngine) -> None:
    wanted = prompt("Pepper. " * 300, max_tokens=1)
    salted, other = scheduled(wanted, cache_salt="salt"), scheduled(wanted, cache_salt="other")
    cached = [last(await generate(engine, each)).cached_tokens for each in (salted, salted, other, wanted, wanted)]
    assert [bool(tokens) for tokens in cached] == [False, True, False, False, True]


async def test_priority_without_a_priority_scheduler_is_refused(engine: VllmEngine) -> None:
    wanted = prompt("Say hello.")
    with pytest.raises(errors.InvalidRequest) as refused:
        await generate(engine, scheduled(wanted, priority=-1))
    assert refused.value.param == "priority"
    seam = Seam(engine.llm, vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(policy="priority")))
    watched = replace(engine, llm=seam)
    for priority in (0, -1, 5):
        assert token_ids(await generate(watched, scheduled(wanted, priority=priority)))
    assert [options["priority"] for options in seam.requests] == [0, -1, 5]


class Seam:
    """An `AsyncLLM` that keeps the options of its requests; ``seeming`` overrides its attributes."""

    def __init__(self, llm: Any, **seeming: Any) -> None:
        self.llm = llm
        self.requests: list[dict[str, Any]] = []
        vars(self).update(seeming)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    async def add_request(self, *values: Any, **options: Any) -> Any:
        self.requests.append(options)
        return await self.llm.add_request(*values, **options)

    def generate(self, prompt: Any, params: Any, name: str) -> Any:
        self.requests.append({"params": params})
        return self.llm.generate(prompt, params, name)


async def test_trace_headers_reach_the_engine(engine: VllmEngine) -> None:
    traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    seam = Seam(engine.llm)
    watched = replace(engine, llm=seam)
    assert token_ids(await generate(watched, scheduled(prompt("Say hello."), trace_headers=traced)))
    assert token_ids(await generate(watched, prompt("Say hello.")))
    assert [options["trace_headers"] for options in seam.requests] == [traced, None]


async def test_warm_up_pays_for_grammars_and_logprobs(engine: VllmEngine) -> None:
    """The warm-up request has a grammar and logprobs, so vLLM builds both before the first request."""
    seam = Seam(engine.llm)
    await replace(engine, llm=seam).warm_up(WARM_UP)
    [wanted] = seam.requests
    assert wanted["params"].structured_outputs.grammar == WARM_UP
    assert wanted["params"].logprobs is not None


# Adapters


async def test_adapter_answers_under_its_own_name(engine: VllmEngine) -> None:
    assert engine.models == ("tiny-gpt-oss", "nonsense")
    body: dict[str, Any] = {"max_output_tokens": 40}
    before = await respond(engine, "Say hello.", **body)
    other = await respond(engine, "Say hello.", model="nonsense", **body)
    after = await respond(engine, "Say hello.", model="tiny-gpt-oss", **body)
    assert other.model == "nonsense"
    assert after.model == "tiny-gpt-oss"
    assert answer(before) == answer(after) == "Hello! How can I help you today?"
    assert "Hello! How can I help" not in "".join(map(spoken, other.output))


async def test_missing_adapter_stops_the_start(engine: VllmEngine, tmp_path: Path) -> None:
    lost = msgspec.structs.replace(
        engine._adapters["nonsense"], lora_name="lost", lora_int_id=9, lora_path=str(tmp_path / "nowhere")
    )
    broken = replace(engine, _adapters={"lost": lost})
    with pytest.raises(UnknownModel, match="lost"):
        await broken.warm_up(WARM_UP)
    assert engine.is_alive


@pytest.mark.defect("B27")
async def test_logprobs_spell_the_answer(engine: VllmEngine) -> None:
    response = await respond(
        engine, "Say hello in many scripts.", include=["message.output_text.logprobs"], top_logprobs=2
    )
    message = response.output[-1]
    assert isinstance(message, Message)
    (part,) = message.content
    assert isinstance(part, OutputText)
    assert b"".join(bytes(logprob.bytes) for logprob in part.logprobs).decode() == part.text
    assert {len(logprob.top_logprobs) for logprob in part.logprobs} == {2}


# What goes wrong


async def test_malformed_grammar_is_refused(engine: VllmEngine) -> None:
    wanted = prompt("Say hello.")
    with pytest.raises(errors.InvalidRequest):
        await generate(engine, msgspec.structs.replace(wanted, grammar="start: ("))
    assert token_ids(await generate(engine, wanted))


async def test_unenforceable_grammar_fails_its_response(engine: VllmEngine) -> None:
    words = " | ".join(f'"a{number}b{number * 7919 % 20011}"' for number in range(20000))
    wanted = msgspec.structs.replace(prompt("Say hello."), grammar=f"start: ({words})+")
    with pytest.raises(errors.EngineFailed):
        await generate(engine, wanted)
    assert token_ids(await generate(engine, prompt("Say hello.")))


@pytest.mark.defect("31")
@pytest.mark.parametrize("bound", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_leaving_at_any_point_aborts(engine: VllmEngine, stats: EngineStats, phase: str, bound: bool) -> None:
    text = "word " * 7000 if phase == "prefill" else "Never stop talking."
    wanted = prompt(text, max_tokens=1000)
    if bound:
        wanted = msgspec.structs.replace(sampled(wanted, logprobs=5), grammar=r"start: /(.|\n)*/")
    async with engine.open(wanted) as stream:
        if phase == "prefill":
            await stats.until(lambda: stats.running > 0)
        for _ in range(5 if phase == "decode" else 0):
            await anext(stream)
    await until_idle(engine)
    assert token_ids(await generate(engine, prompt("Say hello.")))


@pytest.mark.defect("31")
async def test_cancelling_the_start_aborts(engine: VllmEngine) -> None:
    wanted = prompt("Never stop talking.", max_tokens=1000)
    for steps in range(12):
        task = asyncio.create_task(generate(engine, wanted))
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await until_idle(engine)


@pytest.mark.last(1)
async def test_dead_engine_fails_streams_and_health(engine: VllmEngine, stats: EngineStats, tmp_path: Path) -> None:
    async with running_server(stoppable(engine), tmp_path) as served:
        before = stats.generated
        reading = asyncio.create_task(served.stream({"input": "Never stop talking.", "temperature": 0}))
        await stats.until(lambda: stats.generated > before)
        llm: Any = engine.llm
        for process in llm.engine_core.resources.engine_manager.processes:
            process.kill()
        response = final(read_sse(await asyncio.wait_for(reading, PATIENCE)))
        assert response.status == "failed"
        assert response.error is not None
        assert response.error.code == "server_error"
        assert (await served.get("/health"))[0] == 503
        assert (await served.post({"input": "Hi"}))[0] == 503
    with pytest.raises(errors.EngineDead):
        await generate(engine, prompt("Say hello."))
