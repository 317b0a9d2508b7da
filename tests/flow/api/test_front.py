"""``GET /``: a page for browsers, and text for other clients; a browser opens it in `tests/live/page`."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from aiohttp import web
from pytest_aiohttp.plugin import AiohttpClient

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.server import ScriptedServer, running_server, script

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "Sec-Fetch-Mode": "navigate"}


async def test_browser_gets_a_page_that_loads_nothing_from_elsewhere(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/", headers=BROWSER) as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")
        policy, page = answer.headers["Content-Security-Policy"], await answer.text()
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
    for kind in ("style", "script"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        assert f"{kind}-src 'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" in policy
    assert not re.search(r"""(src|href)=["']?/|<(img|iframe|form action|script src)""", page)


async def test_other_clients_get_text(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/") as answer:
        assert (answer.status, answer.content_type, answer.headers["Vary"]) == (200, "text/plain", "Accept")
        assert "POST /v1/responses " in await answer.text()


async def test_text_names_the_prefix(served: ScriptedServer, aiohttp_client: AiohttpClient) -> None:
    outer = web.Application()
    outer.add_subapp("/llm", served.api.app(1000))
    client = await aiohttp_client(outer)
    assert "POST /llm/v1/responses " in await (await client.get("/llm/")).text()
    refused = await client.post("/llm/v1/nothing")
    assert "POST /llm/v1/responses," in (await refused.json())["error"]["message"]


async def test_page_needs_neither_key_nor_name_and_can_be_linked_to(tmp_path: Path) -> None:
    """It holds nothing of the server: its script needs the key for that."""
    linked = {**BROWSER, "Host": "gpubox", "Sec-Fetch-Site": "cross-site"}
    for keys in (Keys(), Keys(given=["a-key-of-sixteen-or-more"])):
        async with running_server(ScriptedEngine(script()), tmp_path, keys=keys) as server:
            async with server.client.get(f"{server.url}/", headers=linked) as answer:
                assert answer.status == 200
            async with server.client.get(f"{server.url}/v1/models", headers=linked) as answer:
                assert answer.status in (401, 403)


async def test_foreign_script_cannot_read_the_page(served: ScriptedServer) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    async with served.client.get(f"{served.url}/", headers=headers) as answer:
        assert answer.status == 403
