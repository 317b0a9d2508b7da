"""``/usage`` over HTTP: the page, and the data that it reads; a browser opens it in `tests/live/page`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.use import Use
from tests.support.live_server import CLIENT, KEY, bearer, live_server
from tests.support.server import script


async def test_page_allows_no_script_or_style_from_elsewhere(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script()), tmp_path, resources=("accounts", "live")) as served:
        policies = []
        for path in ("/usage", "/live"):
            async with served.client.get(f"{served.url}{path}") as answer:
                assert answer.status == 200
                policies.append(answer.headers["Content-Security-Policy"].split("; "))
        hashed = ("style-src", "script-src")
        usage, live = ([each for each in policy if not each.startswith(hashed)] for policy in policies)
        assert usage == live
        assert usage[0] == "default-src 'none'"


@pytest.mark.parametrize(
    ("query", "param"), [("days=0", "days"), ("days=401", "days"), ("days=x", "days"), ("by=owner", "by")]
)
async def test_wrong_query_is_refused(tmp_path: Path, query: str, param: str) -> None:
    async with (
        live_server(ScriptedEngine(script()), tmp_path, resources=("accounts",)) as served,
        served.client.get(f"{served.url}/usage/data?{query}", headers=bearer()) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


async def test_data_has_each_day_for_the_operator_alone(tmp_path: Path) -> None:
    async with live_server(ScriptedEngine(script()), tmp_path, resources=("accounts",)) as served:

        async def data(key: str) -> tuple[int, Any]:
            url = f"{served.url}/usage/data?days=3&by=model"
            async with served.client.get(url, headers=bearer(key)) as answer:
                return answer.status, await answer.json()

        assert (await data(CLIENT))[0] == 401
        noted = served.store.used(
            Use(id="resp_1", model="tiny", api="chat", at=time.time() - 86_400, input_tokens=5, output_tokens=2)
        )
        assert noted
        await noted
        status, found = await data(KEY)
        assert status == 200
        assert len(found["days"]) == 3
        assert (found["keeps"], found["currency"], found["budgets"]) == (True, None, [])
        (group,) = found["groups"]
        assert (group["name"], group["input_tokens"], group["output_tokens"]) == ("tiny", [0, 5, 0], [0, 2, 0])
        assert group["cost"] == [None] * 3


async def test_server_that_keeps_no_accounts_says_so(tmp_path: Path) -> None:
    changes = {"ledger_ttl": 0}
    async with (
        live_server(ScriptedEngine(script()), tmp_path, resources=("accounts",), changes=changes) as served,
        served.client.get(f"{served.url}/usage/data", headers=bearer()) as answer,
    ):
        assert (await answer.json())["keeps"] is False
