"""Budgets at the edges: the words, statuses and headers that clients know, and what goes on when one is spent."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.api.start.parts import preloaded
from penstock.extensions.accounts import spending
from penstock.extensions.accounts.accounts_file import Accounts, UnusableAccounts
from penstock.extensions.accounts.budgets import HEADER, Gate
from penstock.extensions.accounts.ledger import Ledger
from penstock.pipeline.errors import BudgetSpent
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.use import Use
from tests.support.api_clients import openai_client, wait_until
from tests.support.messages import anthropic_client
from tests.support.server import PacedEngine, Server, running_server, script
from tests.support.server_process import running_process
from tests.support.socket_client import connected

CI, WEB = "the-key-of-ci-01", "the-key-of-web-1"
SPENT = "You exceeded your current quota, please check your plan and billing details: "
LATER = "You have reached your specified API usage limits. You will regain access on "
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}

FILE = """
[prices."*"]
output = 1_000_000

[budgets.key.ci]
month-money = {most}
"""


@asynccontextmanager
async def serving(
    where: Path | str, folder: Path, text: str, beside: Sequence[str] = (), **options: Any
) -> AsyncGenerator[Server[Any], None]:
    """A server of two keys with a file of accounts."""
    file = folder / "accounts.toml"
    write(file, text)
    settings = read_settings([]).model_copy(update={"accounts": file, "batch_at_once": 2})
    options.setdefault("engine", ScriptedEngine(script()))
    keys = Keys(given=[f"{CI} name=ci team=infra", f"{WEB} name=web team=infra"])
    engine = options.pop("engine")
    async with running_server(
        engine, where, keys=keys, settings=settings, resources=("accounts", *beside), **options
    ) as served:
        yield served


def write(file: Path, text: str) -> None:
    file.write_text(text)


def bearer(key: str = CI) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def spend(served: Server[Any], tokens: int = 10, key: str = CI, team: str = "infra") -> None:
    """Have a key use tokens, each of which costs 1 USD."""
    owner = served.api.keys.owner(f"Bearer {key}")
    name = served.api.keys.title(owner)
    use = Use(
        id=f"resp_{os.urandom(8).hex()}",
        owner=owner,
        key_name=name,
        team=team,
        model="tiny",
        api="x",
        output_tokens=tokens,
    )
    noted = served.store.used(use)
    assert noted
    await noted


PATHS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi", "model": "tiny"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "instructions": "It greets."}]},
    "/openresponses/v1/responses": {"input": "Hi"},
}


async def test_key_whose_budget_is_spent_is_refused_in_the_words_of_openai(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path, FILE.format(most=10)) as served:
        await spend(served)
        for path, body in PATHS.items():
            async with served.client.post(f"{served.url}{path}", json=body, headers=bearer()) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["type"], error["code"]) == (429, *["insufficient_quota"] * 2), path
                assert error["message"].startswith(f"{SPENT}10 USD of the month for key ci are used up. {LATER}20")
                assert answer.headers["x-should-retry"] == "false"
                assert "Retry-After" not in answer.headers
                assert answer.headers[HEADER] == "100% of 10 USD of the month for key ci"
            async with served.client.post(f"{served.url}{path}", json=body, headers=bearer(WEB)) as answer:
                assert answer.status != 429
                assert HEADER not in answer.headers


async def test_messages_are_refused_in_the_words_of_anthropic(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path, FILE.format(most=10)) as served:
        await spend(served)
        async with served.client.post(f"{served.url}/v1/messages", json=CHAT, headers=bearer()) as answer:
            body = await answer.json()
            assert (answer.status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
            assert LATER in body["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"


async def test_sdks_raise_their_errors_and_try_once(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path, FILE.format(most=10)) as served:
        await spend(served)
        asked = list[str]()
        check = served.scheduler.admission.check_gates

        async def counted(owner: str) -> None:
            asked.append(owner)
            await check(owner)

        served.scheduler.admission.check_gates = counted  # type: ignore[method-assign]
        async with openai_client(served.url, CI, retries=3) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.responses.create(model="tiny", input="Hi")
        assert refused.value.code == "insufficient_quota"
        assert len(asked) == 1
        async with anthropic_client(served.url, CI).with_options(max_retries=3) as claude:
            with pytest.raises(anthropic.BadRequestError, match="You have reached your specified API usage limits"):
                await claude.messages.create(**CHAT)
        assert len(asked) == 2


async def test_answers_warn_before_the_budget_is_spent(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path, FILE.format(most=100)) as served:
        for spent, warning in ((79, None), (3, "82% of 100 USD of the month for key ci")):
            await spend(served, spent)
            for method, path, body in (
                ("GET", "/v1/models", None),
                ("POST", "/v1/responses/input_tokens", {"input": "Hi"}),
            ):
                async with served.client.request(method, f"{served.url}{path}", json=body, headers=bearer()) as answer:
                    assert answer.status == 200
                    assert answer.headers.get(HEADER) == warning


async def test_websocket_has_the_refusal_and_the_warning(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, tmp_path, FILE.format(most=10)) as served,
        connected(served, headers=bearer()) as client,
    ):
        await spend(served)
        await client.send(input="Hi")
        error = await client.error()
        assert (error["status"], error["error"]["code"]) == (429, "insufficient_quota")
        assert error["error"]["message"].startswith(SPENT)


async def test_responses_that_run_or_wait_go_on(tmp_path: Path) -> None:
    """Two run and one waits when the first one ends, which spends the budget."""
    engine = PacedEngine(script())
    engine.hold()
    async with serving(tmp_path, tmp_path, FILE.format(most=1), engine=engine, limit=1) as served:
        bodies: Sequence[dict[str, Any]] = [{"input": "Hi", "background": True} for _ in range(2)]
        made = list[str]()
        for body in bodies:
            async with served.client.post(f"{served.url}/v1/responses", json=body, headers=bearer()) as answer:
                assert answer.status == 200
                made.append((await answer.json())["id"])
        await wait_until(lambda: engine.running == 1)
        await spend(served)
        async with served.client.post(f"{served.url}/v1/responses", json=bodies[0], headers=bearer()) as answer:
            assert answer.status == 429
        engine.say_all()
        for response_id in made:

            async def status(name: str = response_id) -> str:
                async with served.client.get(f"{served.url}/v1/responses/{name}", headers=bearer()) as answer:
                    assert answer.status == 200  # reading goes on, too
                    return str((await answer.json())["status"])

            while await status() != "completed":
                pass


async def test_lines_of_batches_wait_for_the_next_budget(tmp_path: Path) -> None:
    """A batch that began before is not failed: it goes on with the next day, month or larger budget."""
    engine = PacedEngine(script())
    engine.hold()
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi"}}
        for number in range(5)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    opened = serving(tmp_path, tmp_path, FILE.format(most=1), ("batches", "files"), engine=engine)
    async with opened as served, openai_client(served.url, CI) as client:
        gate = served.scheduler.admission.gates[0]
        assert isinstance(gate, Gate)
        check, refused = gate.check, list[str]()

        async def counted(owner: str) -> None:
            try:
                await check(owner)
            except BudgetSpent:
                refused.append(owner)
                raise

        gate.check = counted  # type: ignore[method-assign]
        file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
        endpoint: Any = "/v1/responses"
        batch = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        await wait_until(lambda: engine.running)
        await spend(served)
        engine.say_all()

        async def completed() -> int:
            now = await client.batches.retrieve(batch.id)
            assert now.status in ("in_progress", "finalizing", "completed")
            assert now.request_counts
            assert now.request_counts.failed == 0
            return int(now.request_counts.completed)

        async def stopped() -> int:
            """Return how many lines are completed once the runner has found several times that none may begin."""
            seen = len(refused)
            await wait_until(lambda: len(refused) > seen + 2)
            return await completed()

        assert await stopped() < 5
        assert await stopped() == await stopped()
        gate.take(Accounts())
        while await completed() < 5:
            pass


async def test_answer_of_the_server_itself_spends_the_budget(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path, "[budgets.team.infra]\nday-tokens = 1\n") as served:
        for key, stored, status in ((CI, False, 200), (WEB, True, 429)):
            body = {"input": "Hi", "store": stored}
            async with served.client.post(f"{served.url}/v1/responses", json=body, headers=bearer(key)) as answer:
                assert answer.status == status


async def test_servers_of_a_store_share_a_budget(
    store_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "EVERY", 0.02)
    monkeypatch.setattr(spending, "SHARE", 1.0)
    async with (
        serving(store_at, tmp_path, FILE.format(most=10)) as one,
        serving(store_at, tmp_path, FILE.format(most=10)) as other,
    ):
        await spend(one, 6)
        await spend(other, 6)

        async def refuses(served: Server[Any]) -> bool:
            body = {"input": "Hi", "store": False}
            async with served.client.post(
                f"{served.url}/v1/responses/input_tokens", json=body, headers=bearer()
            ) as answer:
                return answer.status == 429

        for served in (one, other):
            while not await refuses(served):
                pass
        (sums,) = await one.store.part(Ledger).sums(0, 2**40)
        assert sums.cost == 12.0


WRONG = ("[prices.tiny]\nprompt = 1\n", "prices.tiny.prompt: there is no such key")


async def test_wrong_file_ends_the_start_before_the_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "accounts.toml"
    write(file, WRONG[0])
    for store, problem in ((str(tmp_path / "s.sqlite3"), WRONG[1]), ("none", "needs a store")):
        settings = read_settings(["--accounts", str(file), "--store", store])
        with pytest.raises(UnusableAccounts, match=problem):
            preloaded(settings)


async def test_sighup_reads_the_file_again(tmp_path: Path) -> None:
    keys, file = tmp_path / "keys", tmp_path / "accounts.toml"
    write(keys, f"{CI} name=ci\n")
    keys.chmod(0o600)
    write(file, "[budgets.key.ci]\nday-tokens = 1_000_000\n")
    options = ("--api-key-file", str(keys), "--accounts", str(file))
    async with running_process(str(tmp_path / "s.sqlite3"), tmp_path, "quick", *options) as server:

        async def status() -> int:
            async with server.client.post(
                f"{server.url}/v1/responses", json={"input": "Hi"}, headers=bearer()
            ) as answer:
                return answer.status

        async def read_again(line: str) -> None:
            seen = server.log.read_text().count(line)
            os.kill(server.pid, signal.SIGHUP)
            await wait_until(lambda: server.log.read_text().count(line) > seen)

        assert await status() == 200
        write(file, "[budgets.key.ci]\nday-tokens = 1\n")
        await read_again("SIGHUP: the accounts were read again")
        assert await status() == 429
        write(file, WRONG[0])
        await read_again("SIGHUP: the accounts stay as they were: --accounts")
        assert await status() == 429
        write(file, "[budgets.key.cy]\nday-tokens = 1\n")
        await read_again("budgets.key.cy: no API key has name=cy")
        assert await status() == 200
