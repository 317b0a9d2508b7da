from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import cycle, islice
from math import inf
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from llguidance import LLMatcher, grammar_from
from msgspec import structs

from penstock.api.http.bodies import Model
from penstock.api.metrics.sampler import of_engines
from penstock.pipeline.errors import EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt, ServerStopping
from penstock.pipeline.frames import Origin, Prompt, Scheduling, TokenChunk, TokenLogprob
from penstock.pipeline.metrics import ENGINE_WEIGHTS
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.services.engines import replicas, vllm_http
from penstock.services.engines.affinity import RANK_HEADER, RETURNING, WORTH, Ranking
from penstock.services.engines.engine import CacheHint
from penstock.services.engines.http_endpoints import COMPLETIONS, ENDPOINTS, GENERATE, Endpoint, constrained_to
from penstock.services.engines.http_generation import HttpGeneration
from penstock.services.engines.replicas import (
    MISSED_CHECKS,
    MOST_CORES,
    EventSource,
    Replica,
    Replicas,
    UnusableServer,
)
from penstock.services.engines.vllm import sampling_params
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE
from penstock.testing import check_engine
from tests.support.api_clients import wait_until
from tests.support.event_streams import generate, last, logprobs, token_ids
from tests.support.fake_vllm import (
    MARKER_IDS,
    FakeVllm,
    Fault,
    alternatives,
    engine_over,
    own_logprob,
    prompt_at,
    prompt_for_fakes,
    running_fakes,
)
from tests.support.processes import PATIENCE
from tests.support.tool_servers import web_server

pytestmark = pytest.mark.io

TOKENS = [11, 12, 13, 14, 15]

OWN = next(each.default for each in structs.fields(Model) if each.name == "owned_by")
"""The make of a penstock."""

either = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
both = pytest.mark.parametrize("scale_out", [True, False])


# Starting


async def test_engine_keeps_all_rules() -> None:
    async with engine_over(FakeVllm(range(1, 1200))) as engine:
        await check_engine(engine)


async def test_served_models_are_read_from_the_server() -> None:
    async with engine_over(FakeVllm()) as engine:
        assert engine.models == ("tiny", "also-tiny", "nonsense")
        assert (engine.context_length, engine.root) == (8192, "/models/tiny")
        assert (engine.speaks_harmony, engine.vocabulary_size) == (True, VOCABULARY_SIZE)
        assert engine.is_alive


async def test_compressed_answer_of_an_engine_is_not_inflated() -> None:
    cards = b'{"data": [{"id": "tiny", "max_model_len": 8192}]}'

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(cards), headers={"Content-Encoding": "gzip"})

    async with web_server(answer) as url:
        with pytest.raises(UnusableServer, match="its answer to /v1/models is of an unexpected form"):
            await start_vllm_http([url], wait=0)


@pytest.mark.parametrize(("markers", "speaks"), [([27, 91, 5], False), (None, None)])
async def test_other_vocabularies_are_not_harmony(markers: list[int] | None, speaks: bool | None) -> None:
    async with engine_over(FakeVllm(markers=markers)) as engine:
        assert engine.speaks_harmony is speaks
        assert engine.vocabulary_size > VOCABULARY_SIZE


@pytest.mark.parametrize(("markers", "speaks"), [(MARKER_IDS, True), ([27, 91, 5], False), (None, None)])
async def test_completion_tells_harmony_if_tokens_are_refused(markers: list[int] | None, speaks: bool | None) -> None:
    async with engine_over(FakeVllm(markers=markers, tokenizes=False)) as engine:
        assert engine.speaks_harmony is speaks


async def test_model_name_can_be_chosen() -> None:
    async with engine_over(FakeVllm(), model="also-tiny") as engine:
        assert engine.models == ("also-tiny", "tiny", "nonsense")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"key": "secret-key-of-the-engine"}, "PENSTOCK_ENGINE_KEY"),
        ({"scale_out": False, "tells_ids": False}, "--enable-scale-out"),
        (
            {"scale_out": False, "tells_ids": False, "make": "sglang"},
            r"is not `vllm serve`: it returns no token ids\. A server",
        ),
        ({"make": OWN}, r"is not `vllm serve`: it is a penstock\. A server"),
        ({"names": ("other",)}, "does not serve tiny"),
        ({"context_length": None}, r"is not `vllm serve`.* context length of its model.* chat_endpoint\.py"),
    ],
)
async def test_unusable_server_is_reported_with_its_reason(server: dict[str, Any], words: str) -> None:
    fake = FakeVllm(**server)
    async with running_fakes(fake):
        with pytest.raises(UnusableServer, match=words):
            await start_vllm_http([fake.url], "tiny")


async def test_missing_server_ends_the_start() -> None:
    with pytest.raises(UnusableServer, match="No engine answers"):
        await start_vllm_http([FakeVllm().url], wait=0.0)


async def test_loading_server_is_waited_for() -> None:
    """Both servers may be started at the same time."""
    fake = FakeVllm()
    starting = asyncio.create_task(start_vllm_http([fake.url]))
    await asyncio.sleep(0.1)
    async with running_fakes(fake):
        engine = await starting
        assert token_ids(await generate(engine, prompt_for_fakes())) == TOKENS
        await engine.close()


async def test_servers_must_serve_the_same_models() -> None:
    one, other = FakeVllm(), FakeVllm(names=("tiny", "big"))
    async with running_fakes(one, other):
        with pytest.raises(UnusableServer, match="serve different models"):
            await start_vllm_http([one.url, other.url])


async def test_engine_key_is_sent() -> None:
    async with engine_over(FakeVllm(key="secret-key-of-the-engine"), api_key="secret-key-of-the-engine") as engine:
        assert token_ids(await generate(engine, prompt_for_fakes())) == TOKENS


async def test_redirects_are_not_followed() -> None:
    """A redirect would take the prompt to another server."""
    requested: list[str] = []

    async def lead(request: web.Request) -> web.Response:
        requested.append(request.path)
        return web.Response(status=307, headers={"Location": elsewhere.url + request.path})

    async with running_fakes(elsewhere := FakeVllm()), web_server(lead) as url:
        with pytest.raises(UnusableServer, match="307"):
            await start_vllm_http([url])
        session = aiohttp.ClientSession()
        replica = Replica(url, session, is_healthy=True)
        with pytest.raises(EngineFailed, match="redirect"):
            await HttpGeneration(Replicas((replica,)), prompt_for_fakes(), 0.0).begin()
        assert not await replica.check()
        await session.close()
    assert elsewhere.headers == []
    assert len(requested) == 3


# Generating


@either
@pytest.mark.parametrize("chunk_size", [1, 2, 5])
async def test_all_tokens_arrive_in_order(endpoint: Endpoint[Any], chunk_size: int) -> None:
    fake = FakeVllm(chunk_size=chunk_size, cached_tokens=32)
    async with engine_over(fake, endpoints=(endpoint,)) as engine:
        frames = await generate(engine, prompt_for_fakes())
    assert token_ids(frames) == TOKENS
    assert (last(frames).reason, last(frames).cached_tokens) == ("stop", 32)
    assert last(frames).duration > 0
    assert (fake.running, fake.aborted) == (0, 0)


@either
async def test_token_limit_is_the_finish_reason(endpoint: Endpoint[Any]) -> None:
    async with engine_over(FakeVllm(endless=True), endpoints=(endpoint,)) as engine:
        frames = await generate(engine, prompt_for_fakes(max_tokens=7))
    assert len(token_ids(frames)) == 7
    assert last(frames).reason == "length"


async def test_generate_endpoint_gets_the_whole_prompt() -> None:
    fake = FakeVllm()
    prompt = prompt_for_fakes(
        model="nonsense",
        stop=("END",),
        seed=5,
        top_k=3,
        grammar="start: /x/",
        images=("data:image/png;base64,AA==",),
        scheduling=Scheduling("salt", 3, {"traceparent": "00-1-2-01"}),
        origin=Origin(request_id="trace-1"),
    )
    async with engine_over(fake) as engine:
        await generate(engine, prompt)
    (body,), (headers,) = fake.prompts, fake.headers
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 5,
        "max_tokens": 100,
        "stop_token_ids": [200002],
        "logprobs": None,
        "skip_special_tokens": False,
        "detokenize": False,
        "structured_outputs": {"grammar": "%llguidance {}\nstart: /x/"},
    }
    del body["sampling_params"]
    assert body == {
        "model": "nonsense",
        "request_id": "trace-1-resp_1",
        "token_ids": [1, 2, 3],
        "content_parts": [{"type": "image_url", "url": "data:image/png;base64,AA=="}],
        "reasoning_ended": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "salt",
        "priority": 3,
    }
    assert headers["traceparent"] == "00-1-2-01"


@both
async def test_turns_of_a_conversation_have_one_session_id(scale_out: bool) -> None:
    """Routers send all requests with one id to one engine."""
    fake = FakeVllm(scale_out=scale_out)
    async with engine_over(fake) as engine:
        for number, opening in enumerate(["one", "one", "other"]):
            await generate(engine, prompt_for_fakes(id=f"resp_{number}", origin=Origin(opening=opening)))
    first, second, other = (headers["X-Session-ID"] for headers in fake.headers)
    assert first == second != other


@both
async def test_line_of_a_batch_is_let_go_by_the_name_that_its_server_knows(scale_out: bool) -> None:
    fake = FakeVllm(scale_out=scale_out, takes_hints=True)
    async with engine_over(fake) as engine:
        await engine.ask_for_hints()
        await generate(engine, prompt_for_fakes(id="resp_line", origin=Origin(line="line")))
        assert fake.headers[-1]["X-Session-ID"] == "resp_line"
        assert engine.hint(CacheHint("let_go", "resp_line", "resp_line", 3))


async def test_completions_endpoint_gets_the_whole_prompt() -> None:
    fake = FakeVllm(scale_out=False)
    async with engine_over(fake) as engine:
        await generate(engine, prompt_for_fakes(logprobs=2, grammar="start: /x/", scheduling=Scheduling("salt", 3)))
    (body,) = fake.prompts
    assert body["prompt"] == [1, 2, 3]
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"], body["logprobs"]) == (True, True, 2)
    assert (body["cache_salt"], body["priority"], body["stop_token_ids"]) == ("salt", 3, [200002])
    assert body["structured_outputs"] == {"grammar": "%llguidance {}\nstart: /x/"}
    assert body["skip_special_tokens"] is False


EXTRA: dict[str, Any] = {
    "stop_token_ids": (7,),
    "min_tokens": 3,
    "bad_words": ("a",),
    "logit_bias": {7: -1.5},
    "allowed_token_ids": (7, 8),
    "watermarking": False,
    "extra_args": {"target": 1},
}
SENT = {
    "stop_token_ids": [200002, 7],
    "min_tokens": 3,
    "bad_words": ["a"],
    "logit_bias": {"7": -1.5},
    "allowed_token_ids": [7, 8],
    "watermarking": False,
}


@pytest.mark.parametrize(("scale_out", "extra"), [(True, "extra_args"), (False, "vllm_xargs")])
async def test_parameters_of_vllm_are_sent_if_the_request_has_them(scale_out: bool, extra: str) -> None:
    fake = FakeVllm(scale_out=scale_out)
    async with engine_over(fake) as engine:
        for sampling in (EXTRA, {}):
            await generate(engine, prompt_for_fakes(**sampling))
    given, absent = (body["sampling_params"] if scale_out else body for body in fake.prompts)
    sent = SENT | {extra: {"target": 1}}
    assert {name: given[name] for name in sent} == sent
    assert absent["stop_token_ids"] == [200002]
    assert sent.keys() & absent.keys() == {"stop_token_ids"}


@pytest.mark.parametrize("images", [(), ("data:image/png;base64,AAAA",)], ids=["text", "image"])
@pytest.mark.parametrize("sampled", [8, 11])
async def test_chosen_tokens_are_all_reported(images: tuple[str, ...], sampled: int) -> None:
    fake = FakeVllm(tokens=(sampled,))
    async with engine_over(fake) as engine:
        wanted = prompt_for_fakes(images=images, logprobs=0, logprob_token_ids=(7, 8, 9))
        [token] = logprobs(await generate(engine, wanted))
    assert dict(token.top) == {each: own_logprob(each) for each in {7, 8, 9, sampled}}
    [body] = fake.prompts
    assert ("prompt" in body) is not bool(images)


@pytest.mark.vllm
def test_chosen_tokens_have_no_number_beside_them() -> None:
    params = sampling_params(prompt_for_fakes(logprobs=0, logprob_token_ids=(7, 8)))
    assert (params.logprobs, params.logprob_token_ids, params.num_logprobs) == (None, [7, 8], 2)


@pytest.mark.vllm
def test_engine_in_process_gets_the_same_parameters() -> None:
    params = sampling_params(prompt_for_fakes(**EXTRA))
    assert {name: getattr(params, name) for name in SENT} == SENT | {"logit_bias": {7: -1.5}}
    assert params.extra_args == {"target": 1}


@pytest.mark.vllm
def test_grammars_are_readable_for_guidance_only() -> None:
    """Xgrammar would misread their Lark as its own."""
    xgrammar = import_module("xgrammar")
    grammar = "start: /x/ <[5]>"
    xgrammar.Grammar.from_lark(grammar)
    constrained = constrained_to(grammar)["structured_outputs"]["grammar"]
    with pytest.raises(RuntimeError, match="not supported"):
        xgrammar.Grammar.from_lark(constrained)
    assert not LLMatcher.validate_grammar(grammar_from("grammar", constrained))


@either
@pytest.mark.parametrize("top", [0, 1, 3, 20])
async def test_logprobs_belong_to_their_tokens(endpoint: Endpoint[Any], top: int) -> None:
    async with engine_over(FakeVllm(chunk_size=2), endpoints=(endpoint,)) as engine:
        received = logprobs(await generate(engine, prompt_for_fakes(logprobs=top)))
    assert [logprob.logprob for logprob in received] == [own_logprob(token) for token in TOKENS]
    room = top if endpoint is COMPLETIONS else min(top, 19)  # vLLM has no place for the twentieth beside the token
    for token, logprob in zip(TOKENS, received, strict=True):
        assert list(logprob.top[:room]) == alternatives(token, top)[:room]
        assert len(logprob.top) == top


@either
async def test_logprobs_are_sent_only_if_requested(endpoint: Endpoint[Any]) -> None:
    async with engine_over(FakeVllm(), endpoints=(endpoint,)) as engine:
        assert logprobs(await generate(engine, prompt_for_fakes())) == []


@either
@pytest.mark.parametrize("top", [0, 1, 3])
async def test_tokens_of_the_prompt_are_scored(endpoint: Endpoint[Any], top: int) -> None:
    server = FakeVllm()
    async with engine_over(server, endpoints=(endpoint,)) as engine:
        frames = await generate(engine, prompt_for_fakes(token_ids=(4, 5, 6, 7), prompt_logprobs=top, max_tokens=2))
    assert token_ids(frames) == TOKENS[:2]
    assert last(frames).reason == "length"
    (chunk,) = (frame for frame in frames if isinstance(frame, TokenChunk))
    ranks = {5: 60000, 6: 1, 7: 60000}
    assert chunk.prompt_logprobs == tuple(
        TokenLogprob(own_logprob(token), tuple(alternatives(token, top)), ranks[token]) for token in (5, 6, 7)
    )


@either
async def test_scored_prompt_can_be_cancelled(endpoint: Endpoint[Any]) -> None:
    server = FakeVllm(latency=PATIENCE)
    wanted = prompt_for_fakes(prompt_logprobs=1)
    async with engine_over(server, endpoints=(endpoint,)) as engine:
        running = asyncio.create_task(generate(engine, wanted))
        await wait_until(lambda: server.running == 1)
        assert await engine.cancel(wanted.facts.response_id)
        assert [last(await running).reason] == ["cancelled"]
        await wait_until(lambda: server.aborted == 1)


@either
async def test_scores_that_cannot_be_read_end_the_generation(endpoint: Endpoint[Any]) -> None:
    async with engine_over(FakeVllm(fault="garbage"), endpoints=(endpoint,)) as engine:
        with pytest.raises(EngineFailed, match="cannot be read"):
            await generate(engine, prompt_for_fakes(prompt_logprobs=1))


async def test_slow_reader_gets_bigger_chunks() -> None:
    frames = []
    fake = FakeVllm(tokens=range(1, 501))
    async with engine_over(fake) as engine, engine.open(prompt_for_fakes(max_tokens=1000)) as stream:
        async for frame in stream:
            frames.append(frame)
            await asyncio.sleep(0.01)
    assert token_ids(frames) == list(range(1, 501))
    assert max(len(frame.token_ids) for frame in frames if isinstance(frame, TokenChunk)) > 1


async def test_image_tokens_are_counted_by_the_engine() -> None:
    async with engine_over(FakeVllm()) as engine:
        with_image = await generate(engine, prompt_for_fakes(images=("data:image/png;base64,AA==",)))
        without = await generate(engine, prompt_for_fakes())
    assert (last(with_image).prompt_tokens, last(without).prompt_tokens) == (77, None)


# Refusing


async def test_images_need_the_generate_endpoint() -> None:
    async with engine_over(FakeVllm(scale_out=False)) as engine:
        with pytest.raises(InvalidPrompt, match="--enable-scale-out"):
            await generate(engine, prompt_for_fakes(images=("data:image/png;base64,AA==",)))


@both
@pytest.mark.parametrize(
    ("grammars", "words"), [("refused", "backend guidance"), ("ignored", "enable_in_reasoning true")]
)
async def test_unenforced_grammar_is_refused(grammars: Any, words: str, scale_out: bool) -> None:
    async with engine_over(FakeVllm(grammars=grammars, scale_out=scale_out)) as engine:
        with pytest.raises(InvalidPrompt, match=words):
            await generate(engine, prompt_for_fakes(grammar="start: /x/"))
        assert token_ids(await generate(engine, prompt_for_fakes())) == TOKENS


@pytest.mark.parametrize("in_stream", [False, True])
async def test_refusal_of_the_engine_is_an_invalid_prompt(in_stream: bool) -> None:
    words = {"message": "Too many. (parameter=logprobs, value=30)", "type": "x", "param": "logprobs", "code": 400}
    trouble: dict[str, Any] = (
        {"fault": "error", "words": words} if in_stream else {"status": 400, "words": {"error": words}}
    )
    async with engine_over(FakeVllm(**trouble), FakeVllm(**trouble)) as engine:
        with pytest.raises(InvalidPrompt, match=r"Too many\.$") as raised:
            async with engine.open(prompt_for_fakes()):
                pass
    assert raised.value.param == "top_logprobs"


@pytest.mark.parametrize("status", [429, 503])
async def test_engine_is_overloaded_only_if_every_server_is_full(status: int) -> None:
    full, other = FakeVllm(status=status), FakeVllm(status=status)
    async with engine_over(full, other) as engine:
        with pytest.raises(EngineOverloaded):
            await generate(engine, prompt_for_fakes())
        assert (len(full.prompts), len(other.prompts)) == (1, 1)
        other.status = 200
        for _ in range(3):
            assert token_ids(await generate(engine, prompt_for_fakes())) == TOKENS


async def test_rejected_engine_key_is_no_client_error() -> None:
    async with engine_over(FakeVllm(status=401, words={"error": "Unauthorized"})) as engine:
        with pytest.raises(EngineFailed):
            await generate(engine, prompt_for_fakes())


# Ending


async def test_leaving_aborts() -> None:
    fake = FakeVllm(endless=True, latency=0.01)
    async with engine_over(fake) as engine:
        async with engine.open(prompt_for_fakes(max_tokens=10**6)) as stream:
            await anext(aiter(stream))
            assert fake.running == 1
        await wait_until(lambda: fake.running == 0)
        assert fake.aborted == 1


@pytest.mark.parametrize("silence", [0.0, 60.0])
async def test_cancelling_the_reader_aborts(silence: float) -> None:
    fake = FakeVllm(endless=True, latency=0.01, silence=silence)
    async with engine_over(fake) as engine:
        task = asyncio.create_task(generate(engine, prompt_for_fakes(max_tokens=10**6)))
        await wait_until(lambda: fake.running == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: fake.running == 0)


@pytest.mark.parametrize("reads_on", [True, False])
async def test_cancelled_response_ends_after_received_tokens(reads_on: bool) -> None:
    fake = FakeVllm(endless=True, latency=0.005)
    async with engine_over(fake) as engine, engine.open(prompt_for_fakes(max_tokens=10**6)) as stream:
        frames = [await anext(aiter(stream))]
        reading = asyncio.create_task(_rest(stream)) if reads_on else None
        await wait_until(lambda: fake.generated > 50)  # so that more than ten have arrived
        assert not await engine.cancel("resp_2")
        assert await engine.cancel("resp_1")
        frames += await (reading or _rest(stream))
        await wait_until(lambda: fake.running == 0)
        assert last(frames).reason == "cancelled"
        assert len(token_ids(frames)) > 10
        assert token_ids(frames) == list(islice(cycle(TOKENS), len(token_ids(frames))))
        assert fake.aborted == 1


async def _rest(stream: Any) -> list[Any]:
    return [frame async for frame in stream]


async def test_finished_response_cannot_be_cancelled() -> None:
    async with engine_over(FakeVllm()) as engine:
        async with engine.open(prompt_for_fakes()) as stream:
            await _rest(stream)
            assert not await engine.cancel("resp_1")
        assert not await engine.cancel("resp_1")


async def test_stopping_ends_running_streams() -> None:
    running, waiting = FakeVllm(endless=True, latency=0.01), FakeVllm(endless=True, latency=0.01)
    async with engine_over(running, waiting) as engine:
        tasks = [asyncio.create_task(generate(engine, prompt_for_fakes(max_tokens=10**6, id="resp_1")))]
        await wait_until(lambda: running.running + waiting.running)
        waiting.is_silent = running.is_silent = True
        tasks += [asyncio.create_task(generate(engine, prompt_for_fakes(id=f"resp_{number}"))) for number in (2, 3)]
        await wait_until(lambda: running.generated + waiting.generated > 10)
        await engine.stop()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
        assert [type(end) for end in ends] == [EngineFailed, ServerStopping, ServerStopping]
        with pytest.raises(ServerStopping):
            await generate(engine, prompt_for_fakes())
        await wait_until(lambda: running.running == 0)


# Faults


WORDS = {
    "dies": "closed the connection",
    "ends": "closed the connection",
    "garbage": "sent an answer that cannot be read",
    "mute": "sent an answer that cannot be read",
    "error": "answered 500: It broke.",
    "abort": "ended the generation with the reason 'abort'",
}


@either
@pytest.mark.parametrize("fault", WORDS)
@pytest.mark.parametrize("after", [1, 3])
async def test_failure_in_mid_stream_is_raised_once(endpoint: Endpoint[Any], fault: Fault, after: int) -> None:
    words = {"message": "It broke.", "type": "InternalServerError", "param": None, "code": 500}
    broken, well = FakeVllm(fault=fault, after=after, words=words), FakeVllm(status=500)
    async with engine_over(broken, well, endpoints=(endpoint,)) as engine:
        seen: list[Any] = []
        with pytest.raises(EngineFailed) as failure:
            async with engine.open(prompt_at(broken, engine)) as stream:
                async for frame in stream:
                    seen.append(frame)  # noqa: PERF401 - the loop ends by its error
        assert token_ids(seen) == TOKENS[:after]
        told = failure.value.message
        assert told.startswith(f"Engine 1 of 2 {WORDS[fault]}")
        assert broken.url not in told  # clients need not know it
        assert broken.url in str(failure.value)
        assert failure.value.__cause__ is None  # one line in the log says all
        assert well.prompts == []
        await wait_until(lambda: broken.running == 0)


@pytest.mark.parametrize("trouble", [{"fault": "dies"}, {"fault": "ends"}, {"fault": "abort"}, {"status": 500}])
async def test_other_server_takes_over_before_the_first_token(trouble: dict[str, Any]) -> None:
    broken, well = FakeVllm(**trouble), FakeVllm()
    async with engine_over(broken, well) as engine:
        assert token_ids(await generate(engine, prompt_at(broken, engine))) == TOKENS
        assert (len(broken.prompts), len(well.prompts)) == (1, 1)


async def test_other_server_takes_over_an_accepted_prompt() -> None:
    slow, well = FakeVllm(silence=2.0, fault="dies"), FakeVllm()
    async with engine_over(slow, well) as engine, engine.open(prompt_at(slow, engine)) as stream:
        assert well.prompts == []
        assert token_ids(await _rest(stream)) == TOKENS


@pytest.mark.parametrize("count", [1, 4])  # one address may stand for many servers
async def test_prompt_that_may_cause_the_failures_is_tried_twice(count: int) -> None:
    servers = [FakeVllm(status=500) for _ in range(count)]
    async with engine_over(*servers) as engine:
        with pytest.raises(EngineFailed):
            await generate(engine, prompt_for_fakes())
    assert sum(len(server.prompts) for server in servers) == 2


# Several servers


async def test_turns_go_home_until_it_has_more_work_than_to_read_them_elsewhere() -> None:
    servers = [FakeVllm(endless=True, latency=0.01) for _ in range(3)]
    async with engine_over(*servers) as engine:
        tokens = (1,) * int(2 * WORTH / RETURNING)
        prompt, tasks = prompt_at(servers[1], engine, max_tokens=10**6, token_ids=tokens), list[asyncio.Task[Any]]()
        for number, at_home in enumerate((1, 2, 3, 3, 3, 4), start=1):
            tasks.append(asyncio.create_task(generate(engine, prompt)))
            while sum(server.running for server in servers) < number:
                await asyncio.sleep(0.01)
            assert servers[1].running == at_home
        assert [server.running for server in servers] == [1, 4, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_dead_server_is_skipped_until_it_is_back() -> None:
    one, other = FakeVllm(), FakeVllm()
    async with engine_over(one, other) as engine:
        await one.stop()
        for _ in range(6):
            assert token_ids(await generate(engine, prompt_at(one, engine))) == TOKENS
        assert engine.is_alive
        before = len(other.prompts)
        await one.start()
        await wait_until(lambda: all(replica.is_healthy for replica in engine.replicas.all))
        await generate(engine, prompt_at(one, engine))
        assert (len(one.prompts), len(other.prompts)) == (1, before)


async def test_requests_are_refused_until_a_server_is_back() -> None:
    fake = FakeVllm()
    async with engine_over(fake) as engine:
        fake.is_well = False
        await wait_until(lambda: not engine.is_alive)
        with pytest.raises(EngineDead):
            await generate(engine, prompt_for_fakes())
        fake.is_well = True
        await wait_until(lambda: engine.is_alive)
        assert token_ids(await generate(engine, prompt_for_fakes())) == TOKENS


async def test_server_with_another_model_is_skipped() -> None:
    one, other = FakeVllm(), FakeVllm()
    async with engine_over(one, other) as engine:
        one.is_well = False
        await wait_until(lambda: sum(replica.is_healthy for replica in engine.replicas.all) == 1)
        one.names, one.is_well = ("tiny", "big"), True
        await asyncio.sleep(0.3)
        await generate(engine, prompt_at(one, engine))
        assert (len(one.prompts), len(other.prompts)) == (0, 1)


@asynccontextmanager
async def hanging(
    after: int,
) -> AsyncGenerator[tuple[FakeVllm, VllmHttpEngine, list[Any], asyncio.Task[list[Any]]], None]:
    """Yield the frames and the waiting reader of a server that hangs after ``after`` tokens, beside a healthy one."""
    server = FakeVllm(fault="hangs", after=after)
    async with engine_over(server, FakeVllm()) as engine, engine.open(prompt_at(server, engine)) as stream:
        seen: list[Any] = []
        while len(token_ids(seen)) < after:
            seen.append(await anext(aiter(stream)))
        yield server, engine, seen, asyncio.create_task(_rest(stream))


@pytest.mark.parametrize("after", [0, 2])
async def test_silent_stream_lasts_while_its_server_is_healthy(after: int) -> None:
    async with hanging(after) as (server, _, seen, rest):
        await asyncio.sleep(0.5)
        assert not rest.done()
        await server.stop()
        if after:
            with pytest.raises(EngineFailed):
                await rest
            assert token_ids(seen) == TOKENS[:2]
        else:
            assert token_ids(await rest) == TOKENS


class Lost:
    """A generation that counts how often it was given up."""

    count = 0

    def lose(self) -> None:
        self.count += 1


async def test_unresponsive_server_loses_its_streams() -> None:
    lost = Lost()
    async with aiohttp.ClientSession() as session:
        replica = Replica(FakeVllm().url, session)
        replica.cores[0].running.add(lost)
        for _ in range(MISSED_CHECKS - 1):
            assert not await replica.check()
        assert lost.count == 0
        assert not await replica.check()
        assert lost.count == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_lost_stream_moves_before_its_first_token_and_fails_after_it(after: int) -> None:
    async with hanging(after) as (server, engine, _, rest):
        await wait_until(lambda: server.running == 1)
        (generation,) = next(replica for replica in engine.replicas.all if replica.running).running
        generation.lose()
        if after:
            with pytest.raises(EngineFailed):
                await rest
        else:
            assert token_ids(await rest) == TOKENS
        await wait_until(lambda: server.running == 0)


def test_generate_endpoint_is_preferred() -> None:
    assert ENDPOINTS == (GENERATE, COMPLETIONS)


# Known caches


@dataclass
class Caches:
    """Prefix caches whose contents a test sets."""

    reported: tuple[str, ...]
    known: dict[str, int] | None = None
    forgotten: list[str] = field(default_factory=list)
    followed: dict[str, Sequence[EventSource]] = field(default_factory=dict)
    cleared_at: float = -inf

    def cached(self, prompt: Prompt, adapter: str | None) -> dict[str, int] | None:
        self.asked = prompt, adapter
        return self.known

    def sizes(self) -> dict[str, int]:
        return dict.fromkeys(self.reported, 1)

    def forget(self, url: str, unless_cleared_after: float | None = None) -> None:
        if unless_cleared_after is None or self.cleared_at <= unless_cleared_after:
            self.forgotten.append(url)

    def follow(self, url: str, sources: Sequence[EventSource]) -> None:
        self.followed[url] = sources


async def test_prompt_goes_to_the_server_that_holds_it() -> None:
    one, other = FakeVllm(TOKENS), FakeVllm(TOKENS)
    async with engine_over(one, other) as engine:
        engine.follow(caches := Caches((one.url, other.url)))
        for holder, second in ((one, other), (other, one)):
            caches.known = {holder.url: 3}
            await generate(engine, prompt_at(second, engine))
            assert len(holder.prompts) == 1
        caches.known = None
        await generate(engine, prompt_at(one, engine))
        assert len(one.prompts) == 2


async def test_load_of_other_clients_counts() -> None:
    one, other = FakeVllm(TOKENS, waiting=5), FakeVllm(TOKENS)
    async with engine_over(one, other) as engine:
        at_one, at_other = engine.replicas.all
        engine.follow(Caches((one.url, other.url), {one.url: 3}))
        await wait_until(lambda: at_one.cores[0].load == 5)
        await generate(engine, prompt_at(one, engine))
        assert len(other.prompts) == 1
        await one.stop()
        await at_one.poll_load()
        assert (at_one.cores[0].load, at_other.cores[0].load) == (0, 0)


# Data parallel ranks


def ranks_of(server: FakeVllm) -> list[str | None]:
    return [headers.get(RANK_HEADER) for headers in server.headers]


async def test_number_of_ranks_is_bounded() -> None:
    async with engine_over(FakeVllm(TOKENS, ranks=MOST_CORES + 9)) as engine:
        (replica,) = engine.replicas.all
        await replica.poll_load()
        assert len(replica.cores) == MOST_CORES
        assert not await replica.poll_load()


async def test_turns_of_a_conversation_go_to_the_same_rank() -> None:
    """The prompts are long, so that no load is as much work."""
    async with engine_over(server := FakeVllm(TOKENS, ranks=4)) as engine:
        ranks = {core.name: str(core.number) for core in engine.replicas.all[0].cores}
        prompts = [prompt_for_fakes(id=f"resp_{name}", token_ids=(1,) * 20_000) for name in range(9)]
        for prompt in prompts * 3:
            await generate(engine, prompt)
        assert ranks_of(server) == [ranks[next(Ranking(ranks).of(prompt.facts))] for prompt in prompts] * 3


async def test_server_of_one_rank_is_not_told_any() -> None:
    async with engine_over(server := FakeVllm(TOKENS)) as engine:
        await generate(engine, prompt_for_fakes())
        assert ranks_of(server) == [None]


async def test_ranks_that_show_late_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core of vLLM's is in its metrics from its first request on."""
    monkeypatch.setattr(vllm_http, "ALONE_INTERVAL", 0.01)
    async with engine_over(server := FakeVllm(TOKENS)) as engine:
        server.ranks = 2
        await wait_until(lambda: len(engine.replicas.all[0].cores) == 2)


async def test_generation_of_a_rank_that_is_no_longer_reported_counts() -> None:
    async with running_fakes(server := FakeVllm(ranks=2)), aiohttp.ClientSession() as session:
        replica, left = Replica(server.url, session), Lost()
        await replica.poll_load()
        replica.cores[1].running.add(left)
        for ranks, loads in ((1, [0]), (2, [0, 1])):
            server.ranks = ranks
            assert await replica.poll_load()
            assert [core.load for core in replica.cores] == loads
            assert replica.running == [left]


async def test_load_of_each_rank_counts() -> None:
    """The prompts are short, so that each goes to the rank that is idler."""
    async with engine_over(server := FakeVllm(TOKENS, ranks=2, waiting=5)) as engine:
        await wait_until(lambda: [core.load for core in engine.replicas.all[0].cores] == [0, 5])
        for name in range(9):
            await generate(engine, prompt_for_fakes(id=f"resp_{name}"))
        assert {*ranks_of(server)} == {"0"}


async def test_prompt_goes_to_the_rank_that_holds_it() -> None:
    async with engine_over(server := FakeVllm(TOKENS, ranks=3)) as engine:
        names = [core.name for core in engine.replicas.all[0].cores]
        engine.follow(caches := Caches(tuple(names)))
        await wait_until(lambda: server.url in caches.followed)
        assert [source.endpoint for source in caches.followed[server.url]] == [f"tcp://*:{5557 + n}" for n in range(3)]
        for name in names:
            caches.known = {name: 3}
            await generate(engine, prompt_for_fakes())
        assert ranks_of(server) == ["0", "1", "2"]


async def test_prompt_for_a_rank_that_has_gone_goes_to_another() -> None:
    async with engine_over(server := FakeVllm(TOKENS, ranks=8)) as engine:
        server.ranks = 1
        for name in range(9):
            assert token_ids(await generate(engine, prompt_for_fakes(id=f"resp_{name}"))) == TOKENS
        server.ranks = 2
        replica = engine.replicas.all[0]
        await engine.replicas.poll(replica)
        assert [core.number for core in replica.cores] == [0, 1]


async def test_prompt_of_an_adapter_is_looked_up_as_such() -> None:
    one, other = FakeVllm(TOKENS), FakeVllm(TOKENS)
    async with engine_over(one, other) as engine:
        engine.follow(caches := Caches((one.url, other.url)))
        await generate(engine, prompt_for_fakes(model="nonsense"))
        assert caches.asked[1] == "nonsense"
        await generate(engine, prompt_for_fakes(model="also-tiny"))
        assert caches.asked[1] is None


async def test_cancelled_prompt_is_not_sent_after_it_was_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is looked up in a thread, and may be cancelled meanwhile."""
    monkeypatch.setattr(replicas, "LONG_PROMPT", 1)
    one, other = FakeVllm(TOKENS), FakeVllm(TOKENS)
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Caches):
        def cached(self, prompt: Prompt, adapter: str | None) -> None:
            begun.set()
            goes_on.wait(PATIENCE)

    async with engine_over(one, other) as engine:
        engine.follow(Slow((one.url, other.url)))
        wanted = prompt_for_fakes()
        generating = asyncio.create_task(generate(engine, wanted))
        await wait_until(begun.is_set)
        assert await engine.cancel(wanted.facts.response_id)
        goes_on.set()
        assert last(await generating).reason == "cancelled"
        assert not one.prompts
        assert not other.prompts


async def test_silent_server_makes_nothing_known() -> None:
    """Its conversations would go to others, although it holds them."""
    one, other = FakeVllm(TOKENS), FakeVllm(TOKENS)
    async with engine_over(one, other) as engine:
        engine.follow(Caches((one.url,), {one.url: 3}))
        await generate(engine, prompt_at(other, engine))
        assert len(other.prompts) == 1
        other.is_well = False
        await wait_until(lambda: not engine.replicas.all[1].is_healthy)
        assert await engine.replicas.cached(prompt_for_fakes()) == {one.url: 3}


async def test_cache_of_a_server_that_was_away_is_forgotten() -> None:
    one, other = FakeVllm(TOKENS), FakeVllm(TOKENS)
    async with engine_over(one, other) as engine:
        engine.follow(caches := Caches((one.url, other.url)))
        one.is_well = False
        await wait_until(lambda: not engine.replicas.all[0].is_healthy)
        assert caches.forgotten == []
        one.is_well = True
        await wait_until(lambda: engine.replicas.all[0].is_healthy)
        assert caches.forgotten == [one.url]


# Weights


@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": 0}], ids=["streamed", "whole"])
async def test_weights_of_an_output_are_named_by_its_tokens(extra: dict[str, Any]) -> None:
    fake = FakeVllm(TOKENS, weights=(("one", 0, 2), ("two", 2, 9), ("three", 9, 11)))
    async with engine_over(fake) as engine:
        assert last(await generate(engine, prompt_for_fakes(**extra))).weights == (
            WeightSpan("one", 0, 2),
            WeightSpan("two", 2, len(TOKENS)),
        )
        assert engine.replicas.all[0].weights.version == "two"


@either
async def test_server_that_names_no_weights_has_none(endpoint: Endpoint[Any]) -> None:
    async with engine_over(FakeVllm(), endpoints=(endpoint,)) as engine:
        assert last(await generate(engine, prompt_for_fakes())).weights == ()
        assert engine.replicas.all[0].weights.version == ""


async def test_cache_of_older_weights_is_forgotten_unless_it_was_cleared() -> None:
    one, other = FakeVllm(TOKENS, weights=[("one", 0, 5)]), FakeVllm(TOKENS, weights=[("one", 0, 5)])
    async with engine_over(one, other) as engine:
        here, there = engine.replicas.all
        engine.follow(caches := Caches((one.url, other.url)))
        await generate(engine, prompt_at(one, engine))
        await generate(engine, prompt_at(one, engine))
        assert caches.forgotten == []
        one.weights = [("one", 0, 2), ("two", 2, 5)]
        await generate(engine, prompt_at(one, engine))
        assert caches.forgotten == [one.url]
        one.weights, caches.cleared_at = [("three", 0, 5)], inf
        await generate(engine, prompt_at(one, engine))
        assert caches.forgotten == [one.url]
        assert weights_shown(engine) == {(here.address, "three")}
        other.weights = [("two", 0, 5)]
        await generate(engine, prompt_at(other, engine))
        assert weights_shown(engine) == {(here.address, "three"), (there.address, "two")}


def weights_shown(engine: VllmHttpEngine) -> set[tuple[str, ...]]:
    """The engine and the version of each series of the metric."""
    return {(*labels,) for (gauge, *labels), _ in of_engines(engine) if gauge is ENGINE_WEIGHTS}
