from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import TokenFrame
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.count_tokens import TOKENS, count, install
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import FEW_EXAMPLES, any_case, response_with, unedited
from tests.support.server import CALL, COUNT, WEATHER, running_server, script


def counting(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("parse", "count_tokens", count)


def counted() -> Counter[str]:
    [family] = TOKENS.collect()
    return Counter({one.labels["kind"]: int(one.value) for one in family.samples if one.name.endswith("_total")})


@FEW_EXAMPLES
@given(any_case())
def test_each_token_is_counted_once(frames: list[TokenFrame]) -> None:
    already = counted()
    answer = response_with(frames, counting)
    new = counted() - already
    assert answer == response_with(frames, unedited)
    assert answer.usage is not None
    assert new.total() == answer.usage.output_tokens


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {one.labels["kind"]: one.value for one in samples if one.name == "written_tokens_total"}


async def test_prometheus_reads_the_counts(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(COUNT))
    already = counted()
    async with running_server(engine, tmp_path, edit=install) as served:
        first = final(read_sse(await served.stream({"input": "Hi"})))
        again = read_sse(await served.replay(first.id))
        assert final(again) == first
        second = await served.wait_for_end(await served.start_background())
        engine.script = script(CALL)
        third = final(read_sse(await served.stream({"input": "Hi", "tools": [WEATHER]})))
        found = await asyncio.to_thread(scraped, f"{served.url}/metrics")
    new = {name: found[name] - already[name] for name in found}
    assert first.usage is not None
    assert third.usage is not None
    usages = (first.usage.output_tokens, second["usage"]["output_tokens"], third.usage.output_tokens)
    assert sum(new.values()) == sum(usages)
    assert new["Message"] > 2 * 99
    assert new["Reasoning"] > 0
    assert new["FunctionCall"] > 0
    assert new["Other"] < 10  # markup
