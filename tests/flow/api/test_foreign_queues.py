"""The names by which a server takes over a response of the queue of another one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import PacedEngine, running_server, script


@pytest.mark.parametrize(
    ("models", "aliases", "asked", "runs_on"),
    [
        (("big", "adapter"), {}, "adapter", "adapter"),
        (("small",), {"big": "small"}, "big", "small"),
        (("small",), {"b*": "small"}, "big", "small"),
        (("small",), {"*": "small"}, "a\0b", "small"),
        (("big",), {"other*": "big"}, "other name", "big"),
        (("big",), {}, "other name", None),
        (("big",), {}, "adapter", None),
        (("small",), {"big": "small"}, "adapter", None),
        (("small",), {}, "a\0b", None),
    ],
)
async def test_server_runs_what_it_serves(
    models: tuple[str, ...], aliases: Mapping[str, str], asked: str, runs_on: str | None, store_at: str
) -> None:
    async with running_server(
        PacedEngine(script(), models=("first",), initial=0), store_at, aliases={"*": "first"}, limit=1
    ) as first:
        await first.start_background()
        waiting = await first.start_background({"model": asked})
    second = ScriptedEngine(script(), models=models)
    async with running_server(second, store_at, aliases=aliases, unserved_after=0.0) as server:
        ended = await server.wait_for_end(waiting)
    assert ended["model"] == asked
    assert ended["status"] == ("completed" if runs_on else "failed"), ended["error"]
    assert {prompt.facts.model for prompt in second.prompts if prompt.facts.response_id == waiting} == {runs_on} - {
        None
    }
