"""`/metrics`: each metric of the server moves with its event, and no label holds a text of a client."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from penstock.api.http.auth import Keys
from penstock.api.http.connections import bind
from penstock.api.http.held_bytes import HeldBytes
from penstock.api.metrics.sampler import Sampler
from penstock.api.metrics.scrape import serving_metrics
from penstock.pipeline.errors import EngineFailed
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import ApiClient, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, ENDLESS, HELLO, WEATHER, PacedServer, ScriptedServer, running_server, script
from tests.support.socket_client import connected

KEY = "a-key-of-many-characters"
HOSTILE = 'x"} evil 1\nevil'


async def scraped(served: ApiClient, **headers: str) -> Counter[str]:
    """The values of all series, by name and labels as they are written."""
    async with served.client.get(f"{served.url}/metrics", headers=headers) as answer:
        assert answer.status == 200
        text = await answer.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Counter({f"{each.name}{sorted(each.labels.values())}": each.value for each in samples})


def responses_metric(mode: str, status: str = "completed") -> str:
    return f"penstock_responses_total{sorted(['', mode, status, 'tiny'])}"


class Difference:
    """The growth of the series of penstock since the last look."""

    def __init__(self, served: ApiClient) -> None:
        self.served = served
        self.before: Counter[str] = Counter()

    async def seen(self) -> Counter[str]:
        now = await scraped(self.served)
        before, self.before = self.before, now
        grown = {name: value - before[name] for name, value in now.items() if name.startswith("penstock_")}
        return Counter({name: value for name, value in grown.items() if value})


@pytest.fixture
async def growth(served: PacedServer) -> Difference:
    difference = Difference(served)
    await difference.seen()
    return difference


async def test_stream_is_measured(served: PacedServer, growth: Difference) -> None:
    response = final(read_sse(await served.stream({"input": "Hi", "temperature": 0.5})))
    assert response.usage is not None
    seen = await growth.seen()
    assert seen[responses_metric("stream")] == 1
    assert seen["penstock_response_duration_seconds_count['stream', 'tiny']"] == 1
    assert seen["penstock_time_to_first_event_seconds_count['responses', 'tiny']"] == 1
    assert seen["penstock_time_to_first_token_seconds_count['responses', 'tiny']"] == 1
    assert seen["penstock_tokens_total['input', 'tiny']"] == response.usage.input_tokens
    assert seen["penstock_tokens_total['output', 'tiny']"] == response.usage.output_tokens
    assert seen["penstock_turns_per_response_sum[]"] == 1
    assert seen["penstock_parameters_total['temperature']"] == 1
    assert seen["penstock_parameters_total['top_p']"] == 0
    assert seen["penstock_http_requests_total['/v1/responses', '200', 'POST', 'responses']"] == 1
    assert seen["penstock_render_seconds_count[]"] == 1
    assert seen["penstock_store_operation_seconds_count['write']"] >= 1


async def test_modes_are_told_apart(served: PacedServer, growth: Difference) -> None:
    await served.post({"input": "Hi"})
    await served.wait_for_end(await served.start_background())
    async with connected(served) as client:
        await client.send(input="Hi")
        await client.stream()
        assert (await scraped(served))["penstock_websocket_connections[]"] == 1
    seen = await growth.seen()
    for mode in ("sync", "background", "websocket"):
        assert seen[responses_metric(mode)] == 1
    assert seen["penstock_time_to_first_token_seconds_count['responses', 'tiny']"] == 1  # only of the stream


async def test_open_stream_and_its_loss_are_measured(served: PacedServer, growth: Difference) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        during = await growth.seen()
        assert during["penstock_streams_open['stream']"] == 1
        assert during["penstock_responses_running['stream', 'tiny']"] == 1
    await wait_until(lambda: served.scheduler.in_flight.count == 0)
    after = await growth.seen()
    assert after["penstock_streams_open['stream']"] == -1
    assert after["penstock_responses_running['stream', 'tiny']"] == -1
    assert after["penstock_client_disconnects_total['stream']"] == 1
    assert after["penstock_http_requests_total['/v1/responses', '499', 'POST', 'responses']"] == 1
    assert after[responses_metric("stream", "cancelled")] == 1


async def test_each_choice_of_a_chat_is_measured(served: PacedServer, growth: Difference) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": True}
    await served.stream(body, "/v1/chat/completions")
    seen = await growth.seen()
    assert seen["penstock_time_to_first_event_seconds_count['chat', 'tiny']"] == 2
    assert seen["penstock_time_to_first_token_seconds_count['chat', 'tiny']"] == 2


async def test_resumed_stream_is_measured(served: PacedServer, growth: Difference) -> None:
    response = final(read_sse(await served.stream({"input": "Hi"})))
    await served.replay(response.id)
    seen = await growth.seen()
    assert seen["penstock_stream_resumes_total[]"] == 1
    assert seen["penstock_time_to_first_event_seconds_count['responses', 'tiny']"] == 1  # that of the first stream


async def test_failures_calls_and_repairs_are_counted(served: PacedServer, growth: Difference) -> None:
    served.engine.script = script(CALL)
    await served.post({"input": "Hi", "tools": [WEATHER]})
    served.engine.script = script(HELLO.removesuffix("<|return|>"), error=EngineFailed("It failed."))
    await served.post({"input": "Hi"})
    served.engine.script = script("<|message|>No channel.<|return|>")
    await served.post({"input": "Hi"})
    seen = await growth.seen()
    assert seen["penstock_tool_calls_total['completed', 'function']"] == 1
    assert seen["penstock_responses_total['failed', 'server_error', 'sync', 'tiny']"] == 1
    assert seen["penstock_stage_errors_total['generate']"] == 1
    assert seen["penstock_harmony_repairs_total['missing channel']"] == 1


async def test_refusals_are_counted_by_their_code(served: PacedServer, growth: Difference) -> None:
    await served.post({"input": "Hi", "model": "another"})
    await served.post({"input": "Hi", "temperature": "hot"})
    await served.get("/v1/responses/resp_missing")
    seen = await growth.seen()
    assert seen["penstock_refused_total['model_not_found']"] == 1
    assert sum(value for name, value in seen.items() if name.startswith("penstock_refused_total")) == 3
    assert seen["penstock_http_requests_total['/v1/responses/{response_id}', '404', 'GET', 'responses']"] == 1


async def test_no_label_holds_a_text_of_the_client(served: PacedServer) -> None:
    await served.post({"input": HOSTILE, "model": HOSTILE, "metadata": {"evil": "evil"}, "evil": 1})
    await served.post({"input": HOSTILE, "user": HOSTILE, "tools": [{**WEATHER, "name": "evil"}]})
    await served.get("/v1/evil")
    async with served.client.request("EVIL", f"{served.url}/v1/responses/evil") as answer:
        assert answer.status >= 400
    async with served.client.get(f"{served.url}/metrics") as answer:
        assert "evil" not in (await answer.text()).lower()


async def test_server_with_keys_wants_a_key_of_its_own_for_metrics(tmp_path: Path) -> None:
    keys = Keys(None, KEY)
    async with running_server(ScriptedEngine(script()), tmp_path, keys=keys) as served:
        for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer "}):
            async with served.client.get(f"{served.url}/metrics", headers=headers) as answer:
                assert answer.status == 401
                assert "PENSTOCK_METRICS_KEY, is not set" in await answer.text()


async def test_port_of_its_own_has_the_metrics_alone(served: ScriptedServer) -> None:
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    async with (
        serving_metrics(Sampler(served.scheduler, HeldBytes()), bound),
        aiohttp.ClientSession() as client,
    ):
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 200
            assert "penstock_event_loop_lag_seconds" in await answer.text()
        async with client.get(f"http://127.0.0.1:{port}/v1/models") as answer:
            assert answer.status == 404


async def test_held_loop_shows_in_its_lag(served: PacedServer, growth: Difference) -> None:
    asyncio.get_running_loop().call_soon(time.sleep, 0.6)
    lag = "penstock_event_loop_lag_seconds_bucket['{}']"
    async with asyncio.timeout(120):
        while (seen := await growth.seen())[lag.format("+Inf")] == seen[lag.format("0.25")]:
            await asyncio.sleep(0.05)


async def test_names_of_vllm_stay_as_they_are(served: PacedServer) -> None:
    """In OpenMetrics, which Prometheus prefers, its colon would be lost."""
    vllm = Gauge("vllm:num_requests_running", "as vLLM names it")
    try:
        async with served.client.get(
            f"{served.url}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        ) as answer:
            assert answer.content_type == "text/plain"
            assert "\nvllm:num_requests_running 0.0\n" in await answer.text()
    finally:
        REGISTRY.unregister(vllm)
