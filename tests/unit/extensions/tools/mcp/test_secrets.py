"""Secrets for an MCP server are not read by others."""

from __future__ import annotations

import logging

import pytest

from penstock.pipeline.protocol.tools import McpServer
from penstock.pipeline.secret import Secret
from penstock.services.mcp_config import HttpServer, mask_secrets
from penstock.services.tools import ServerUnavailable, ToolResult
from tests.support.mcp_servers import PATIENT, HttpServers, MakeServers, stdio_server

pytestmark = pytest.mark.io

PASSWORD = "pass-word-4711"
QUERY = "query-secret-4712"
KEY = "sk-header-secret-4713"
SECRETS = (PASSWORD, QUERY, KEY)


def secret_url(http: HttpServers, kind: str, over: str) -> str:
    return http.url(kind, over).replace("http://", f"http://me:{PASSWORD}@") + f"?token={QUERY}"


@pytest.mark.parametrize("over", ["mcp", "sse"])
async def test_secrets_are_in_no_result_message_or_log(
    over: str, make: MakeServers, http: HttpServers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    servers = make()
    received = []
    headers = Secret({"X-Key": KEY, "Authorization": f"Bearer {KEY}"})
    for kind in ("good", "broken", "guarded", "away"):
        server = McpServer("x", secret_url(http, kind, over) + "&to=http://10.0.0.1/", headers)
        try:
            received.append(str(await servers.tools(server, PATIENT)))
        except ServerUnavailable as unavailable:
            received.append(str(unavailable))
        session = servers.session(server)
        received += [str(await session.run("leak", "{}", PATIENT)), repr(session), repr(server.headers)]
        await session.close()
    assert '"x-key": "[hidden]"' in received[1].replace("\\", "")
    for text in (*received, caplog.text):
        assert not [secret for secret in SECRETS if secret in text]


async def test_operator_secrets_are_hidden_in_results(make: MakeServers) -> None:
    servers = make({"ours": stdio_server(FILES_TOKEN=KEY, FOLDER="/srv/documents")})
    session = servers.session(McpServer("ours"))
    for name, received in (("FILES_TOKEN", "[hidden]"), ("FOLDER", "/srv/documents")):
        assert await session.run("environment", f'{{"name": "{name}"}}', PATIENT) == ToolResult(received)
    await session.close()


def test_passwords_queries_and_headers_are_hidden() -> None:
    config = HttpServer(
        "https://me:p%40ssword-1@x.example/mcp?a=long-enough%21&b=2",
        {"Authorization": "Bearer abcdefghij", "Accept": "application/json", "X-Short": "yes"},
    )
    text = "p@ssword-1 p%40ssword-1 long-enough! abcdefghij Bearer abcdefghij application/json yes 2"
    assert mask_secrets(config).mask(text) == " ".join(["[hidden]"] * 5) + " application/json yes 2"
    assert "ssword" not in repr(config)
    assert "abcdefghij" not in repr(config)
