from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path

import openai
import pytest
from pydantic import ValidationError

from penstock.api.cli.serve import greeting, main
from penstock.api.http.api_key import ApiKey, digest_of, key_of
from penstock.api.http.auth import OPEN, Keys
from penstock.api.http.key_sources import UnusableKeys, seal_keys
from penstock.api.limits.admission import Admission
from penstock.api.resources.resources import SHIPPED
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of
from penstock.pipeline.errors import CannotRun, StoreFailed, Unauthorized
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store
from tests.support.api_clients import PATIENCE, openai_client, wait_until
from tests.support.live_server import live_server
from tests.support.paths import ROOT
from tests.support.server import ScriptedServer, running_server, script
from tests.support.server_process import ServerProcess, running_process
from tests.support.socket_client import connected
from tests.support.stores import FaultyDatabase, open_store

ALICE = "sk-alice-0123456789"
BOB = "sk-bob-0123456789ab"
CAROL = "sk-carol-0123456789"
STRANGERS = ["", "Bearer", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", f"Basic {ALICE}", ALICE, "Bearer \xe9" * 9]


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script()), tmp_path, keys=Keys(given=(ALICE, BOB))) as served:
        yield served


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


HEADERS: list[dict[str, str]] = [
    {"Authorization": f"Bearer {ALICE}"},
    {"x-api-key": ALICE},
    {"Authorization": f"Bearer {ALICE}", "x-api-key": "sk-ant-old-0123456789"},
    {"Authorization": "Bearer sk-ant-old-0123456789", "x-api-key": ALICE},
    {"Authorization": "Basic b2xkOm9sZA==", "x-api-key": ALICE},
    {"Authorization": f"Bearer {ALICE}", "x-api-key": ""},
]
"""The headers of a client with a valid key, beside which another one may be old."""

MARKS: list[dict[str, str]] = [{}, {"anthropic-version": "2023-06-01"}]


def routes_of(server: ScriptedServer) -> set[tuple[str, str]]:
    """Return the method and a path of each route of a server."""
    routes = server.api.app(1).router.routes()
    return {(each.method, re.sub(r"\{.*?\}", "x", each.resource.canonical)) for each in routes if each.resource}


@pytest.mark.parametrize("mark", MARKS, ids=["openai", "anthropic"])
@pytest.mark.parametrize("headers", HEADERS, ids=["bearer", "bare", "old bare", "old bearer", "basic", "empty"])
async def test_each_route_takes_the_key_in_either_header(
    tmp_path: Path, headers: dict[str, str], mark: dict[str, str]
) -> None:
    engine, keys = ScriptedEngine(script()), Keys(given=ALICE, operator=ALICE)
    async with live_server(engine, tmp_path, keys=keys, metrics_key=ALICE, resources=SHIPPED) as locked:
        walked = routes_of(locked)
        assert {("GET", "/metrics"), ("GET", "/v1/files"), ("POST", "/live/watch")} <= walked
        for method, path in walked:
            async with locked.client.request(method, locked.url + path, headers=headers | mark) as answer:
                assert answer.status != 401, (method, path)


@pytest.mark.parametrize("headers", HEADERS)
async def test_socket_takes_the_key_in_either_header(locked: ScriptedServer, headers: dict[str, str]) -> None:
    async with connected(locked, headers=headers) as client:
        assert (await client.create(input="Hi")).status == "completed"


async def test_first_valid_key_of_a_request_is_its_owner(locked: ScriptedServer) -> None:
    both = {"Authorization": f"Bearer {ALICE}", "x-api-key": BOB}
    async with locked.client.post(f"{locked.url}/v1/responses", json={"input": "Hi"}, headers=both) as answer:
        url = f"{locked.url}/v1/responses/{(await answer.json())['id']}"
    for key, status in ((ALICE, 200), (BOB, 404)):
        async with locked.client.get(url, headers={"x-api-key": key}) as answer:
            assert answer.status == status


OF_OPENAI = re.compile(r"/(v1|openresponses/v1)/(responses|conversations|chat/completions|completions|decisions)(/|$)")


@pytest.mark.parametrize("mark", MARKS, ids=["openai", "anthropic"])
async def test_each_route_refuses_a_client_in_the_form_of_its_api(tmp_path: Path, mark: dict[str, str]) -> None:
    """Routes that several APIs have, and unknown ones, take the form of the client; others have only one."""
    engine, keys = ScriptedEngine(script()), Keys(given=ALICE, operator=ALICE)
    async with live_server(engine, tmp_path, keys=keys, metrics_key=ALICE, resources=SHIPPED) as locked:
        walked = {(method, path) for method, path in routes_of(locked) if method != "HEAD" and path not in OPEN}
        for method, path in walked | {("GET", "/v1/nothing"), ("GET", "/nothing"), ("PATCH", "/v1/models")}:
            async with locked.client.request(method, locked.url + path, headers=mark) as answer:
                body = await answer.json()
            of_anthropic = path.startswith("/v1/messages") or (bool(mark) and not OF_OPENAI.match(path))
            assert ("type" in body, "request-id" in answer.headers) == (of_anthropic,) * 2, (method, path)
            kind = "authentication_error" if of_anthropic else "invalid_request_error"
            assert (answer.status, body["error"]["type"]) == (401, kind), (method, path)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/metrics", "/live/server"])
async def test_two_wrong_keys_are_unauthorized(tmp_path: Path, path: str) -> None:
    wrong = {"Authorization": f"Bearer {ALICE}x", "x-api-key": f"{ALICE}y"}
    engine, keys = ScriptedEngine(script()), Keys(given=ALICE, operator=ALICE)
    async with (
        live_server(engine, tmp_path, keys=keys, metrics_key=ALICE) as locked,
        locked.client.get(locked.url + path, headers=wrong) as answer,
    ):
        assert answer.status == 401


@pytest.mark.defect("V21")
@pytest.mark.parametrize("authorization", STRANGERS)
async def test_missing_or_wrong_key_is_unauthorized(locked: ScriptedServer, authorization: str) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    closed = {route.resource.canonical for route in locked.api.app(1).router.routes() if route.resource}
    for path in closed - OPEN | {"/v1/nothing"}:
        async with locked.client.get(locked.url + path, headers=headers) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.headers["X-Should-Retry"] == "false"
            error = (await answer.json())["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            else:
                assert error["type"] == "invalid_request_error"
                assert (error["code"], error["param"]) == ("invalid_api_key", None)
            is_bearer = authorization.lower().startswith("bearer ")
            if path != "/metrics":
                assert ("unknown, expired or revoked" in error["message"]) == is_bearer


@pytest.mark.parametrize("path", sorted(OPEN - {"/", "/live", "/usage"}))
async def test_health_and_description_need_no_key(locked: ScriptedServer, path: str) -> None:
    assert (await locked.get(path))[0] == 200


@pytest.mark.parametrize("key", [ALICE, BOB])
async def test_every_configured_key_is_accepted(locked: ScriptedServer, key: str) -> None:
    async with openai_client(locked.url, key) as client:
        response = await client.responses.create(input="Hi")
        assert (await client.responses.retrieve(response.id)).output_text == "Hello!"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-somebody-else").models.list()


def test_owner_is_the_digest_of_a_key() -> None:
    for keys in (Keys(given=[ALICE]), Keys(given=[BOB, ALICE, BOB])):
        assert keys.owner(f"bearer  {ALICE} ") == sha256(ALICE.encode()).hexdigest()
    assert Keys().owner("") == Keys().owner(f"Bearer {ALICE}") == ""
    with pytest.raises(Unauthorized):
        Keys(given=[ALICE]).owner("")


async def test_keys_are_never_logged(locked: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (ALICE, "sk-somebody-else"):
            async with locked.client.get(f"{locked.url}/v1/models", headers={"Authorization": f"Bearer {key}"}):
                pass
    assert "401" in caplog.text
    assert not any(secret in text for secret in (ALICE, "somebody-else") for text in (caplog.text, repr(locked.api)))


@pytest.mark.parametrize("text", [f"{ALICE}\n{BOB}\n", f"\ufeff# ours\r\n\r\n {ALICE} # Alice\r\n\t{BOB}\t#\r\n#{BOB}"])
def test_key_file_has_one_key_per_line(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    keys = Keys(key_file, None)
    assert keys.owner(f"Bearer {ALICE}") != keys.owner(f"Bearer {BOB}")
    for other in ("# ours", "#", "", f"{ALICE} # Alice"):
        with pytest.raises(Unauthorized):
            keys.owner(f"Bearer {other}")


def test_key_file_names_the_tools_of_a_key(key_file: Path) -> None:
    key_file.write_text(f"{ALICE} tools=code_interpreter,web_search # Alice\n{BOB}\n")
    keys = Keys(key_file, None)
    assert keys.tools(keys.owner(f"Bearer {ALICE}")) == frozenset[str](("python", "browser"))
    assert keys.tools(keys.owner(f"Bearer {BOB}")) is None
    key_file.write_text(f"{ALICE} tools=python,ALL\n")
    with pytest.raises(UnusableKeys, match="'ALL' is not one of") as refused:
        Keys(key_file, None)
    assert ALICE not in str(refused.value)


@pytest.mark.parametrize("given", [f"{ALICE},{BOB}", f" {ALICE}\n{BOB},, ", (ALICE, BOB)])
def test_environment_may_have_several_keys(given: str | tuple[str, ...]) -> None:
    keys = Keys(None, given)
    assert keys.owner(f"Bearer {ALICE}") != keys.owner(f"Bearer {BOB}")


@pytest.mark.parametrize("lines", [[], ["short"], [ALICE, "with a blank in it"], [ALICE, "sk-\xe4-0123456789"]])
def test_unusable_keys_are_refused(key_file: Path, lines: list[str]) -> None:
    key_file.write_text("\n".join(["# no key", *lines]))
    for source in ((None, tuple(lines)), (key_file, None), (key_file, ALICE)):
        with pytest.raises(
            UnusableKeys, match=r"PENSTOCK_API_KEYS, or api-keys in penstock.toml: |--api-key-file .*/keys: "
        ) as refused:
            Keys(*source)
        assert not any(line in str(refused.value) for line in lines)


@pytest.mark.parametrize("given", ["", " ,\n", f"{ALICE},short"])
def test_empty_environment_variable_is_refused(given: str) -> None:
    """If a secret is missing, the server must not run without keys."""
    with pytest.raises(UnusableKeys):
        Keys(None, given)


def test_unreadable_key_file_is_refused(key_file: Path) -> None:
    """A missing file never means a server without keys, and bytes that are not text cause no traceback."""
    with pytest.raises(UnusableKeys, match="No such file"):
        Keys(key_file, None)
    key_file.write_bytes(b"\xff" * 20)
    with pytest.raises(UnusableKeys):
        Keys(key_file, None)


def test_keys_of_one_name_are_named_once(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = f"{CAROL} name=alice expires=2020-01-31"
    write(key_file, f"{ALICE} name=alice\n{BOB} name=bob\n{old}\n")
    keys = Keys(key_file)
    assert not caplog.messages
    write(key_file, f"{ALICE} name=alice\n{BOB} name=alice\n{old}\n")
    keys.take(keys.read())
    keys.take(keys.read())
    digests = ", ".join(sorted(digest_of(key)[:8] for key in (ALICE, BOB)))
    shared = f"Several API keys have the name alice ({digests}): the log and the metrics do not tell them apart"
    assert caplog.messages == [shared]
    assert_valid(keys, alice=True, bob=True)


def write(file: Path, text: str) -> None:
    file.write_text(text)


def assert_valid(keys: Keys, *, alice: bool, bob: bool) -> None:
    for key, is_valid in ((ALICE, alice), (BOB, bob)):
        if is_valid:
            assert keys.owner(f"Bearer {key}") == digest_of(key)
        else:
            with pytest.raises(Unauthorized):
                keys.owner(f"Bearer {key}")


def test_key_file_is_read_again(key_file: Path) -> None:
    key_file.write_text(f"{ALICE}\n")
    keys = Keys(key_file)
    key_file.write_text(f"sha256:{digest_of(BOB)} name=bob tools=none\n")
    assert_valid(keys, alice=True, bob=False)
    keys.take(keys.read())
    assert_valid(keys, alice=False, bob=True)
    assert keys.tools(digest_of(BOB)) == frozenset()


@pytest.mark.parametrize("text", [None, f"{ALICE}\nshort\n", f"{BOB} name=b limit=gold\n"])
def test_wrong_key_file_changes_nothing_when_it_is_read_again(key_file: Path, text: str | None) -> None:
    key_file.write_text(f"{ALICE}\n")
    keys = Keys(key_file)
    if text is None:
        key_file.unlink()
    else:
        key_file.write_text(text)
    with pytest.raises(UnusableKeys):
        keys.read()
    assert_valid(keys, alice=True, bob=False)


def test_server_is_closed_when_its_last_key_is_revoked(key_file: Path) -> None:
    key_file.write_text(f"{ALICE}\n")
    keys = Keys(key_file)
    key_file.write_text("# none left\n")
    keys.take(keys.read())
    assert_valid(keys, alice=False, bob=False)


def test_expired_key_is_unauthorized(key_file: Path) -> None:
    key_file.write_text(f"{ALICE} expires=2020-01-01\n{BOB} expires=9020-01-01\n")
    assert_valid(Keys(key_file), alice=False, bob=True)


async def test_keys_of_the_store_are_those_of_all_its_servers(store_at: str) -> None:
    keys, others = Keys(given=[ALICE], reads_store=True), Keys(reads_store=True)
    async with open_store(store_at) as store:
        await store.keys.add(digest_of(BOB), "name=bob limits=gold")
        for each in (keys, others):
            assert_valid(each, alice=each is keys, bob=False)
            await each.read_store(store.keys)
            assert_valid(each, alice=each is keys, bob=True)
            assert each.of(digest_of(BOB)) == ApiKey(digest_of(BOB), "name=bob limits=gold", name="bob", limits="gold")
        await store.keys.revoke(digest_of(BOB))
        for each in (keys, others):
            await each.read_store(store.keys)
            assert_valid(each, alice=each is keys, bob=False)
        no_keys = Keys()
        await no_keys.read_store(store.keys)
        assert no_keys.owner("") == ""


async def test_keys_stay_while_the_store_is_out_of_reach(tmp_path: Path) -> None:
    database = FaultyDatabase(SqliteDatabase(tmp_path / "store.sqlite3"))
    keys, store = Keys(reads_store=True), Store(database)
    await store.open()
    await store.keys.add(digest_of(BOB), "")
    await keys.read_store(store.keys)
    database.is_down = True
    with pytest.raises(StoreFailed):
        await keys.read_store(store.keys)
    assert_valid(keys, alice=False, bob=True)
    database.is_down = False
    await store.close()


async def test_key_of_a_newer_release_is_logged_and_not_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(reads_store=True)
    async with open_store(str(tmp_path / "store.sqlite3")) as store:
        await store.keys.add(digest_of(ALICE), "name=alice")
        await store.keys.add(digest_of(BOB), "shape=round")
        for _ in range(2):
            await keys.read_store(store.keys)
    assert_valid(keys, alice=True, bob=False)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert digest_of(BOB)[:8] in record.getMessage()


async def test_open_socket_takes_no_request_once_its_key_is_revoked(key_file: Path, tmp_path: Path) -> None:
    write(key_file, f"{ALICE}\n{BOB}\n")
    keys = Keys(key_file)
    async with running_server(ScriptedEngine(script()), tmp_path, keys=keys) as served:
        headers = {"Authorization": f"Bearer {ALICE}"}
        async with connected(served, headers=headers) as client:
            response = await client.create(input="Hi")
            write(key_file, f"{BOB}\n")
            keys.take(keys.read())
            for kind in ("response.create", "response.steer"):
                await client.socket.send_json({"type": kind, "input": "Hi", "previous_response_id": response.id})
                error = await client.error()
                assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")


async def answers_with(server: ServerProcess, key: str, status: int) -> None:
    """Wait until a server answers that key with that status."""
    headers = {"Authorization": f"Bearer {key}"}
    async with asyncio.timeout(PATIENCE):
        while True:
            async with server.client.get(f"{server.url}/v1/models", headers=headers) as answer:
                if answer.status == status:
                    return
            await asyncio.sleep(0.02)


async def test_sighup_reads_the_key_file_again(key_file: Path, tmp_path: Path) -> None:
    write(key_file, f"{ALICE}\n")
    async with running_process("none", tmp_path, "quick", "--api-key-file", str(key_file)) as server:
        await answers_with(server, ALICE, 200)
        write(key_file, f"sha256:{digest_of(BOB)} name=bob\n")
        os.kill(server.pid, signal.SIGHUP)
        await answers_with(server, BOB, 200)
        await answers_with(server, ALICE, 401)
        write(key_file, "short\n")
        os.kill(server.pid, signal.SIGHUP)
        mistake = "SIGHUP: the API keys stay as they were: --api-key-file"
        await wait_until(lambda: mistake in server.log.read_text())
        await answers_with(server, BOB, 200)
    assert "Traceback" not in server.log.read_text()


async def test_sighup_without_a_file_says_so(tmp_path: Path) -> None:
    async with running_process("none", tmp_path, "quick") as server:
        os.kill(server.pid, signal.SIGHUP)
        line = "SIGHUP: there is no file of API keys, limits, prompts or models to read again"
        await wait_until(lambda: line in server.log.read_text())
    assert "were read again" not in server.log.read_text()


async def test_sighup_compares_keys_with_limits_as_the_start_does(key_file: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    write(key_file, f"{ALICE} name=alice limits=gold\n")
    write(limits, "[gold]\nresponses = 9\n")
    options = ("--api-key-file", str(key_file), "--limits", str(limits))
    async with running_process("none", tmp_path, "quick", *options) as server:

        async def read_again(line: str) -> None:
            seen = server.log.read_text().count(line)
            os.kill(server.pid, signal.SIGHUP)
            await wait_until(lambda: server.log.read_text().count(line) > seen)

        stay = "SIGHUP: the API keys and the limits stay as they were: the API key {} has "
        unknown = "limits={}, and --limits has no table of that name"
        write(key_file, f"{ALICE} name=alice limits=gold\n{BOB} name=bob limits=golf\n")
        await read_again(stay.format("bob") + unknown.format("golf"))
        await answers_with(server, BOB, 401)
        write(key_file, f"{BOB} name=bob webhook=https://b.example/\n")
        await read_again(stay.format("bob") + "webhook=, which needs a store")
        write(key_file, f"{ALICE} name=alice limits=gold\n")
        write(limits, "[silver]\nresponses = 9\n")
        await read_again(stay.format("alice") + unknown.format("gold"))
        write(key_file, f"{BOB} name=bob limits=silver\n")
        assert "were read again" not in server.log.read_text()
        await read_again("SIGHUP: the API keys were read again\n")
        assert "SIGHUP: the limits were read again\n" in server.log.read_text()
        await answers_with(server, BOB, 200)
        await read_again("SIGHUP: the limits were read again, and have not changed")
        write(limits, "[gold\n")
        write(key_file, f"{ALICE}\n")
        await read_again("SIGHUP: the limits stay as they were: --limits")
        await answers_with(server, ALICE, 200)  # a mistake in one file does not keep a key of the other


async def test_stored_key_that_a_server_cannot_serve_is_refused_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits, store_at = tmp_path / "limits.toml", str(tmp_path / "store")
    write(limits, "[gold]\nresponses = 9\n")
    words = {
        "good": "name=good limits=gold",
        "bad": "name=bad limits=golf",
        "hook": "name=hook webhook=https://a.example/",
    }
    async with open_store(store_at) as store:
        for key, each in words.items():
            await store.keys.add(digest_of(f"sk-{key}-0123456789ab"), each)
        settings = Settings.model_validate(
            {"engine_arguments": [], "store": store_at, "store_keys": True, "limits": str(limits)}
        )
        admission = Admission(settings.limits)
        keys = keys_of(settings, admission)
        for _ in range(2):
            await keys.read_store(store.keys)
            keys.take(keys.read())
        assert keys.owner("Bearer sk-good-0123456789ab")
        for key in ("bad", "hook"):
            with pytest.raises(Unauthorized):
                keys.owner(f"Bearer sk-{key}-0123456789ab")
        assert caplog.text.count("The key bad of the store is refused: it has limits=golf, and --limits has no") == 1
        assert caplog.text.count("The key hook of the store is refused: it has webhook=, which needs a secret") == 1
        write(limits, "[golf]\nresponses = 9\n")
        admission.tables = admission.read()
        keys.take(keys.read())
        assert keys.owner("Bearer sk-bad-0123456789ab")
        with pytest.raises(Unauthorized):
            keys.owner("Bearer sk-good-0123456789ab")


async def test_servers_take_and_lose_the_keys_of_their_store(store_at: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running_process(store_at, tmp_path, "quick", "--store-keys"))
            for _ in range(2)
        ]
        async with open_store(store_at) as store:
            for server in servers:
                await answers_with(server, ALICE, 401)
            await store.keys.add(digest_of(ALICE), "name=alice")
            for server in servers:
                await answers_with(server, ALICE, 200)
            await store.keys.revoke(digest_of(ALICE))
            for server in servers:
                await answers_with(server, ALICE, 401)


def test_keys_of_a_store_need_a_store() -> None:
    with pytest.raises(ValidationError, match="--store-keys needs a store"):
        Settings.model_validate({"engine_arguments": [], "store": "none", "store_keys": True})


def test_settings_find_keys_and_do_not_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text(f'api_keys = ["{ALICE}"]')
    assert Settings.model_validate({"engine_arguments": []}).api_keys == (ALICE,)
    monkeypatch.setenv("PENSTOCK_API_KEYS", f"{BOB} {ALICE}")
    settings = Settings.model_validate({"engine_arguments": []})
    assert settings.api_keys == f"{BOB} {ALICE}"
    assert BOB not in repr(settings)


@pytest.mark.parametrize("keys", [None, ALICE])
def test_printed_example_shows_no_key(keys: str | None) -> None:
    printed = greeting(Settings.model_validate({"engine_arguments": [], "api_keys": keys}), 8000, "tiny")
    assert ("Authorization: Bearer $API_KEY" in printed) is (keys is not None)
    assert ALICE not in printed


@pytest.mark.parametrize(
    ("option", "place"),
    [
        (["--api-key", ALICE], "--api-key-file or PENSTOCK_API_KEYS"),
        ([f"--api-keys={ALICE}"], "--api-key-file or PENSTOCK_API_KEYS"),
        (["--web-search-key", ALICE], "PENSTOCK_WEB_SEARCH_KEY"),
        (["--webhook-secret", ALICE], "PENSTOCK_WEBHOOK_SECRET"),
        (["--embeddings-key", ALICE], "PENSTOCK_EMBEDDINGS_KEY"),
    ],
)
def test_key_on_the_command_line_is_refused(option: list[str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is visible to every process of the machine."""
    with pytest.raises(CannotRun, match=place):
        main(["tiny", *option])


def test_seal_keys_come_from_the_file_first(key_file: Path) -> None:
    write(key_file, f"{ALICE} # since May\n{BOB}\n")
    assert seal_keys(key_file, "c" * 20) == [ALICE.encode(), BOB.encode(), b"c" * 20]
    assert seal_keys(None, None) == []


def test_unusable_seal_keys_are_refused(key_file: Path) -> None:
    write(key_file, "short\n")
    with pytest.raises(UnusableKeys, match=r"--seal-key-file .*/keys: the key in line \d has fewer than 16 characters"):
        seal_keys(key_file, None)
    with pytest.raises(UnusableKeys, match=r"PENSTOCK_SEAL_KEYS, or seal-keys in penstock.toml: there is no key"):
        seal_keys(None, "")


@pytest.mark.parametrize(
    ("page", "line"), [("SECURITY.md", "| a client without a key"), ("docs/KEYS.md", "With keys, all routes")]
)
def test_pages_name_each_path_that_needs_no_key(page: str, line: str) -> None:
    _, _, rest = (ROOT / page).read_text().partition(line)
    assert set(re.findall(r"`(/[\w.]*)`", rest[:220])) == OPEN


def test_page_names_each_word_of_a_line() -> None:
    with pytest.raises(ValueError, match="none of ") as refused:
        key_of(f"{ALICE} another=word")
    words = str(refused.value).rpartition("none of ")[2].split(", ")
    assert re.findall(r"^\| `(\w+)=", (ROOT / "docs/KEYS.md").read_text(), re.MULTILINE) == words
