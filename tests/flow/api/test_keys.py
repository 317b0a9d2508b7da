from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from hashlib import sha256
from pathlib import Path

import openai
import pytest

from penstock.api.cli.serve import greeting
from penstock.api.http.auth import Keys, load_keys
from penstock.api.key_sources import UnusableKeys, seal_keys
from penstock.api.settings import Settings
from penstock.pipeline.errors import CannotRun, Unauthorized
from penstock.server import main
from penstock.stages.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.server import ScriptedServer, running_server, script

ALICE = "sk-alice-0123456789"
BOB = "sk-bob-0123456789ab"
STRANGERS = ["", "Bearer", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", f"Basic {ALICE}", ALICE, "Bearer \xe9" * 9]


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script()), tmp_path, keys=Keys((ALICE, BOB))) as served:
        yield served


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.mark.defect("V21")
@pytest.mark.parametrize("authorization", STRANGERS)
async def test_missing_or_wrong_key_is_unauthorized(locked: ScriptedServer, authorization: str) -> None:
    headers = {"Authorization": authorization} if authorization else {}
    closed = {route.resource.canonical for route in locked.api.app(1).router.routes() if route.resource}
    for path in closed - {"/", "/health", "/openapi.json"} | {"/v1/nothing"}:
        async with locked.client.get(locked.url + path, headers=headers) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            error = (await answer.json())["error"]
            assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)


async def test_health_and_description_need_no_key(locked: ScriptedServer) -> None:
    assert (await locked.get("/health"))[0] == (await locked.get("/openapi.json"))[0] == 200


@pytest.mark.parametrize("key", [ALICE, BOB])
async def test_every_configured_key_is_accepted(locked: ScriptedServer, key: str) -> None:
    async with openai_client(locked.url, key) as client:
        response = await client.responses.create(input="Hi")
        assert (await client.responses.retrieve(response.id)).output_text == "Hello!"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-somebody-else").models.list()


def test_owner_is_the_digest_of_a_key() -> None:
    for keys in (Keys([ALICE]), Keys([BOB, ALICE, BOB])):
        assert keys.owner(f"bearer  {ALICE} ") == sha256(ALICE.encode()).hexdigest()
    assert Keys().owner("") == Keys().owner(f"Bearer {ALICE}") == ""
    with pytest.raises(Unauthorized):
        Keys([ALICE]).owner("")


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
    keys = load_keys(key_file, None)
    assert keys.owner(f"Bearer {ALICE}") != keys.owner(f"Bearer {BOB}")
    for other in ("# ours", "#", "", f"{ALICE} # Alice"):
        with pytest.raises(Unauthorized):
            keys.owner(f"Bearer {other}")


def test_key_file_names_the_tools_of_a_key(key_file: Path) -> None:
    key_file.write_text(f"{ALICE} tools=code_interpreter,web_search # Alice\n{BOB}\n")
    keys = load_keys(key_file, None)
    assert keys.tools == {keys.owner(f"Bearer {ALICE}"): {"python", "browser"}}
    assert keys.owner(f"Bearer {BOB}")
    key_file.write_text(f"{ALICE} tools=python,ALL\n")
    with pytest.raises(UnusableKeys, match="'ALL' is not one of") as refused:
        load_keys(key_file, None)
    assert ALICE not in str(refused.value)


@pytest.mark.parametrize("given", [f"{ALICE},{BOB}", f" {ALICE}\n{BOB},, ", (ALICE, BOB)])
def test_environment_may_have_several_keys(given: str | tuple[str, ...]) -> None:
    keys = load_keys(None, given)
    assert keys.owner(f"Bearer {ALICE}") != keys.owner(f"Bearer {BOB}")


@pytest.mark.parametrize("lines", [[], ["short"], [ALICE, "with a blank in it"], [ALICE, "sk-\xe4-0123456789"]])
def test_unusable_keys_are_refused(key_file: Path, lines: list[str]) -> None:
    key_file.write_text("\n".join(["# no key", *lines]))
    for source in ((None, tuple(lines)), (key_file, None), (key_file, ALICE)):
        with pytest.raises(
            UnusableKeys, match=r"PENSTOCK_API_KEYS, or api-keys in penstock.toml: |--api-key-file .*/keys: "
        ) as refused:
            load_keys(*source)
        assert not any(line in str(refused.value) for line in lines)


@pytest.mark.parametrize("given", ["", " ,\n", f"{ALICE},short"])
def test_empty_environment_variable_is_refused(given: str) -> None:
    """If a secret is missing, the server must not run without keys."""
    with pytest.raises(UnusableKeys):
        load_keys(None, given)


def test_unreadable_key_file_is_refused(key_file: Path) -> None:
    """A missing file never means a server without keys, and bytes that are not text cause no traceback."""
    with pytest.raises(UnusableKeys, match="No such file"):
        load_keys(key_file, None)
    key_file.write_bytes(b"\xff" * 20)
    with pytest.raises(UnusableKeys):
        load_keys(key_file, None)


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
    ],
)
def test_key_on_the_command_line_is_refused(option: list[str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is visible to every process of the machine."""
    with pytest.raises(CannotRun, match=place):
        main(["tiny", *option])


def test_seal_keys_come_from_the_file_first(key_file: Path) -> None:
    key_file.write_text(f"{ALICE} # since May\n{BOB}\n")
    assert seal_keys(key_file, "c" * 20) == [ALICE.encode(), BOB.encode(), b"c" * 20]
    assert seal_keys(None, None) == []


def test_unusable_seal_keys_are_refused(key_file: Path) -> None:
    key_file.write_text("short\n")
    with pytest.raises(UnusableKeys, match=r"--seal-key-file .*/keys: key 1 has fewer than 16 characters"):
        seal_keys(key_file, None)
    with pytest.raises(UnusableKeys, match=r"PENSTOCK_SEAL_KEYS, or seal-keys in penstock.toml: there is no key"):
        seal_keys(None, "")
