from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.route_by_content import install
from tests.support.server import running_server, script

LEGAL = {"model": "legal", "temperature": 0.2}
BASE = {"model": "tiny", "temperature": 1.0}


def parts(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]


@pytest.mark.parametrize(
    ("given", "shown", "priority"),
    [
        ("Check this contract.", LEGAL, 0),
        (parts("Urgent: who has the liability?"), LEGAL, -10),
        ([{"role": "developer", "content": "A contract."}, *parts("Hi")], BASE, 0),
    ],
)
async def test_text_selects_the_route(given: Any, shown: dict[str, Any], priority: int, tmp_path: Path) -> None:
    engine = ScriptedEngine(script(), models=("tiny", "legal"))
    async with running_server(engine, tmp_path, edit=install) as served:
        answer = (await served.post({"input": given}))[1]
    [prompt] = engine.prompts
    assert {name: answer[name] for name in shown} == shown
    assert prompt.facts.model == shown["model"]
    assert prompt.facts.sampling.temperature == shown["temperature"]
    assert prompt.facts.scheduling.priority == priority


async def test_route_to_a_missing_adapter_is_refused(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, edit=install) as served:
        status, answer = await served.post({"input": "A contract."})
    assert (status, answer["error"]["param"]) == (404, "model")
