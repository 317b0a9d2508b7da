from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.pipeline.plugins import load
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.event_streams import final, read_sse
from tests.support.fixture_cases import item_texts
from tests.support.server import ENDLESS, HELLO, running_server, script

STAGE = load(["tests.examples.cache_answers:install"])
COLD: dict[str, Any] = {"input": "Hi", "temperature": 0}


async def test_only_a_repeated_prompt_of_temperature_0_is_answered_from_memory(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(HELLO), models=("tiny", "other"))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        first, second = [final(read_sse(await served.stream(COLD))) for _ in range(2)]
        assert len(engine.prompts) == 1
        assert first.id != second.id
        assert item_texts(second) == item_texts(first)
        assert second.usage == first.usage
        changes: list[dict[str, Any]] = [{"temperature": 1}, {"input": "Ho"}, {"model": "other"}, {"seed": 1}]
        for number, other in enumerate(changes, 2):
            await served.stream(COLD | other)
            assert len(engine.prompts) == number
        await served.stream({**COLD, "temperature": 1})
        assert len(engine.prompts) == 6
        continued = await served.post({"input": "And?", "previous_response_id": second.id, "temperature": 0})
        assert continued[0] == 200
        assert "Hello!" in served.prompt_text()


async def test_cut_answers_are_not_kept(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.001))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        async with served.open_stream(COLD) as stream:
            await stream.upto(b"delta")
        await served.wait_until_idle()
        background = await served.start_background(COLD)
        async with served.client.get(f"{served.url}/v1/responses/{background}?stream=true") as answer:
            await answer.content.readuntil(b"output_text.delta")
            assert (await served.cancel(background))[0] == 200
        assert len(engine.prompts) == 2
        engine.script = script(HELLO)
        assert item_texts(final(read_sse(await served.stream(COLD)))) == ["A greeting.", "Hello!"]
