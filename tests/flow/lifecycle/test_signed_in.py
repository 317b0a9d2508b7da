"""Clients who signed in, and the audit log of what they did, over the kill of a server."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from penstock.extensions.sign_in.claims import owner_of
from tests.support.api_clients import wait_until
from tests.support.issuers import AUDIENCE, SUBJECT, Issuer, running_issuer
from tests.support.server_process import ServerProcess, running_process

GROUP = """
[issuers."{url}"]
audience = "{audience}"
[issuers."{url}".claims.groups.research]
team = "research"
limits = "gold"
"""


async def test_background_response_of_a_killed_server_goes_on_as_its_owner(tmp_path: Path) -> None:
    """Its token is needed again to read it.  Each line of the audit log is whole, and so are those of a SIGHUP."""
    audit, file, limits = tmp_path / "audit.jsonl", tmp_path / "sign-in.toml", tmp_path / "limits.toml"
    async with running_issuer() as issuer:
        file.write_text(GROUP.format(url=issuer.url, audience=AUDIENCE))
        limits.write_text("[gold]\nbackground = 1\n")
        options = ("--sign-in", str(file), "--limits", str(limits), "--audit", str(audit), "--resume-interrupted")
        async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "long", *options) as server:
            status, created = await asked(server, issuer, input="Hi", background=True)
            assert status == 200
            await wait_until(lambda: created["id"] in audit.read_text())
            await server.kill()
            await server.start()
            assert (await asked(server, issuer, input="Hi", background=True))[0] == 429
            async with server.client.get(f"{server.url}/v1/responses/{created['id']}") as answer:
                assert answer.status == 401
            file.write_text(file.read_text().replace(AUDIENCE, "another"))
            os.kill(server.pid, signal.SIGHUP)
            await wait_until(lambda: '"subject":"the issuers"' in audit.read_text())
            status, refused = await asked(server, issuer, input="Hi")
            assert (status, refused["error"]["code"]) == (401, "invalid_token")
            await wait_until(lambda: "invalid_token" in audit.read_text())
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
    owner = owner_of(issuer.url, SUBJECT)[:8]
    made, limited, unknown, read_again, *last = [line for line in lines if line.get("rule") or line.get("owner")]
    assert (made["owner"], made["team"], made["response_id"]) == (owner, "research", created["id"])
    assert (limited["owner"], limited["rule"]) == (owner, "rate_limit_exceeded")
    assert (unknown["decision"], unknown["response_id"]) == ("refused", created["id"])
    assert (read_again["rule"], read_again["subject"]) == ("SIGHUP", "the issuers")
    assert [line["rule"] for line in last] == ["invalid_token"]


async def asked(server: ServerProcess, issuer: Issuer, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {issuer.token(groups=['research'])}"}
    async with server.client.post(f"{server.url}/v1/responses", json=body, headers=headers) as answer:
        return answer.status, await answer.json()
