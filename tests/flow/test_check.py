"""``penstock check``: all that can be wrong before a model is loaded."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli import check
from penstock.api.cli.check import Checks, passes
from penstock.api.cli.command_line import read_settings
from penstock.api.cli.drawn import drawn
from penstock.api.cli.serve import main, serve
from penstock.api.runs.store_settings import without_password
from penstock.api.settings import Settings
from penstock.api.start import assembly, backends
from penstock.api.start.assembly import database
from penstock.api.start.parts import UNSTARTABLE
from penstock.pipeline.errors import CannotRun, CannotStart, StoreFailed
from penstock.pipeline.recordings.format import UnreadableRecording
from penstock.services.store.database import Database
from penstock.stages.recordings.recordings import read_recordings
from tests.support.mcp_servers import stdio_config
from tests.support.paths import FIXTURES
from tests.support.processes import free_port
from tests.support.several import ENGINE, MADE, says
from tests.support.stores import NOBODY

SETTINGS: dict[str, Any] = {"engine": [f"replay:{FIXTURES / 'harmony'}"], "store": "none", "sandbox": False}


MARKS = ("ok", "wrong", "-")
"""The beginnings of the lines of checks."""


def checked(capfd: Any, **settings: Any) -> tuple[bool, dict[str, str]]:
    """Run all checks; return if they pass, and the line of each."""
    chosen = Settings.model_validate(SETTINGS | {"port": free_port()} | settings)
    all_pass = asyncio.run(passes(chosen, ()))
    lines = [line.split(maxsplit=2) for line in capfd.readouterr().out.splitlines()]
    return all_pass, {line[1].rstrip(":"): f"{line[0]} {line[2]}" for line in lines if line and line[0] in MARKS}


def models(**tables: Any) -> dict[str, Any]:
    """Settings of models, which the server of `SETTINGS` alone would not have."""
    return {"engine": [], "models": tables}


def rows_of_models(capfd: Any, tables: dict[str, Any]) -> tuple[bool, list[str]]:
    """Run all checks; return if they pass, and the rows of the models."""
    chosen = Settings.model_validate(SETTINGS | {"port": free_port()} | models(**tables))
    all_pass = asyncio.run(passes(chosen, ()))
    return all_pass, [line for line in capfd.readouterr().out.splitlines() if re.match(r"\w+ +model .*:|wrong", line)]


def test_each_of_several_models_has_a_row(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MADE, "big", lambda: says("Hello."))
    nobody = f"http://127.0.0.1:{free_port()}"
    tables: dict[str, Any] = {
        "big": {"engine": [f"{ENGINE}:big"]},
        "small": {"command": "sh", "groups": ["gpu"], "priority": 2},
    }
    all_pass, rows = rows_of_models(capfd, tables)
    assert all_pass
    assert rows == [
        f"ok     model big: speaks Harmony, and runs on {ENGINE}:big",
        f"ok     model small: is known once it runs, and is started by {shutil.which('sh')}; groups gpu; priority 2",
    ]
    tables |= {"vectors": {"urls": [nobody], "kind": "embed"}, "local": {"command": "sh", "model": "/nothing"}}
    all_pass, rows = rows_of_models(capfd, tables)
    assert not all_pass
    assert rows[2:] == [
        f"wrong  model vectors: {nobody} does not answer (ClientConnectorError: Connection refused)",
        "wrong  model local: /nothing: its files cannot be read (ValidationError)",
    ]


def test_pipeline_of_several_models_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MADE, "big", lambda: says("Hello."))
    tables = {"big": {"engine": [f"{ENGINE}:big"]}, "small": {"command": "sh"}, "here": {"model": "/nothing"}}
    chosen = Settings.model_validate(SETTINGS | models(**tables))
    text = asyncio.run(drawn(chosen))
    assert text.splitlines()[:3] == [
        f"big speaks Harmony, and runs on {ENGINE}:big",
        f"small is known once it runs, and is started by {shutil.which('sh')}",
        "here cannot be described: /nothing: there is no such folder",
    ]
    assert text.count("converse    :") == 1


def test_settings_without_a_mistake_pass(capfd: Any, tmp_path: Path) -> None:
    all_pass, lines = checked(capfd, store=str(tmp_path / "store.sqlite3"), record=tmp_path / "recorded")
    assert all_pass
    assert set(lines) == {
        "distribution",
        "user",
        "keys",
        "address",
        "store",
        "clock",
        "accounts",
        "audit",
        "mcp",
        "sandbox",
        "sign_in",
        "tools",
        "prompts",
        "webhooks",
        "record",
        "vllm",
        "model",
        "dialects",
        "pipeline",
    }
    assert lines["pipeline"].startswith("ok tiny-gpt-oss is answered from")


@pytest.fixture
def namesake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The list of files of another distribution named penstock, which is installed for the test."""
    info = tmp_path / "site" / "penstock-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(info.parent)
    return info / "RECORD"


def test_another_penstock_is_named(capfd: Any, namesake: Path, caplog: pytest.LogCaptureFixture) -> None:
    namesake.write_text("flow.py,,\n")
    all_pass, lines = checked(capfd)
    assert all_pass
    assert "; penstock 0.1.0, another project's, is installed beside penstock-llm" in lines["distribution"]
    main(["--engine", SETTINGS["engine"][0], "--print-pipeline"])
    (warned,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warned == "penstock 0.1.0, another project's, is installed beside penstock-llm, which does not need it"


def test_another_penstock_among_our_files_ends_the_start(capfd: Any, namesake: Path) -> None:
    namesake.write_text("penstock/__init__.py,,\n")
    all_pass, lines = checked(capfd)
    assert not all_pass
    assert lines["distribution"].startswith(
        "wrong penstock 0.1.0 is installed beside penstock-llm, and both own penstock/"
    )
    with pytest.raises(CannotRun, match="uninstall both, then install penstock-llm"):
        main(["--engine", SETTINGS["engine"][0]])


def mcp_server(**entry: Any) -> str:
    return json.dumps({"mcpServers": {"clock": entry}})


MISPLACED = "def install(pipeline):\n    return pipeline.insert_after('emit', 'x', pipeline.stage('parse'))\n"

FILES = {
    "broken.json": '{\n  "mcpServers": {} "x"\n}',
    "no_program.json": mcp_server(command="clok"),
    "no_server.json": mcp_server(command="cat"),
    "not_there.json": mcp_server(url="http://127.0.0.1:9/mcp"),
    "no_program_there.json": mcp_server(command="./run", cwd="."),
    "no_variable.json": mcp_server(url="http://x.example/${NOPE}"),
    "misplaced.py": MISPLACED,
    "setting.py": "import pydantic\nclass S(pydantic.BaseModel): pass\ndef install(pipeline, settings: S): pass",
    "prompts/wrong.md": "+++\n",
    "yaml/head.md": "---\nmodel: tiny\n---\nBe brief.\n",
    "keys.txt": "sk-alice-0123456789 webhook=http://10.0.0.1/\n",
    "limited.txt": "sk-alice-0123456789 name=alice limits=golf\n",
    "gold.toml": "[gold]\nrequests_per_minute = 3\n",
}

MODEL = str(FIXTURES / "tiny_qwen")

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("keys", {"api_key_file": "keys"}, "--api-key-file keys: No such file"),
    ("keys", {"api_key_file": "keys.txt", "webhook_secret": "secret"}, "webhook=, which needs a store"),
    ("keys", {"api_key_file": "keys.txt", "store": "store.sqlite3"}, "webhook=, which needs a secret"),
    ("address", {"host": "192.0.2.1"}, "--host 192.0.2.1 --port"),
    ("store clock", {"store": "/dev/null/store"}, "/dev/null/store"),
    ("keys", {"limits": "limits.toml"}, "--limits limits.toml: No such file"),
    ("accounts", {"accounts": "a.toml"}, "--accounts needs a store"),
    ("accounts", {"accounts": "a.toml", "store": "store.sqlite3"}, "--accounts a.toml: No such file"),
    ("audit", {"audit": "none/a.jsonl"}, "--audit none/a.jsonl: No such file"),
    ("sign_in", {"sign_in": "s.toml"}, "--sign-in s.toml: No such file"),
    (
        "keys",
        {"api_key_file": "limited.txt"},
        "the API key alice has limits=golf, and --limits has no table of that name",
    ),
    (
        "keys",
        {"api_key_file": "limited.txt", "limits": "gold.toml"},
        "no table of that name (did you mean gold?)",
    ),
    ("mcp", {"mcp_config": "none.json"}, "--mcp-config none.json: No such file"),
    ("mcp", {"mcp_config": "broken.json"}, "--mcp-config broken.json: Expecting ',' delimiter (line 2, column 20)"),
    ("mcp", {"mcp_config": "no_program.json"}, "clock: there is no program clok"),
    ("mcp", {"mcp_config": "no_program_there.json"}, "clock: there is no program ./run"),
    ("mcp", {"mcp_config": "no_variable.json"}, "there is no NOPE"),
    ("prompts", {"prompts": "nowhere"}, "--prompts nowhere: No such file"),
    ("prompts", {"prompts": "prompts"}, "--prompts prompts/wrong.md: a second line with +++ is missing"),
    ("prompts", {"prompts": "yaml"}, "--prompts yaml/head.md: the head between lines of --- is not read"),
    ("record", {"record": "/dev/null/recordings"}, "/dev/null/recordings"),
    ("pipeline", {"engine": ["replay:/nowhere"]}, "/nowhere"),
    ("pipeline", {"engine": ["http://127.0.0.1:9"]}, "http://127.0.0.1:9: ClientConnectorError: Connection refused"),
    ("pipeline", {"with": ["misplaced.py:install"]}, "x takes TokenFrame"),
    ("pipeline", {"with": ["setting.py:install"], "stages": {"setting": {"x": 1}}}, "[stages.setting]: x: there is no"),
    ("pipeline", {"with": ["nope.py:install"], "engine": [], "model": MODEL}, "there is no file nope.py"),
]
"""Mistakes: the check that finds each, the settings, and a part of the message."""

NO_ANSWER = "clock: it does not answer as an MCP server"

RECEIVER = {"store": "store.sqlite3", "webhook_secret": "secret"}

MISTAKES_ELSEWHERE: list[tuple[str, dict[str, Any], str]] = [
    ("mcp", {"mcp_config": "no_server.json"}, f"--mcp-config no_server.json: {NO_ANSWER}: Method not found"),
    ("mcp", {"mcp_config": "not_there.json"}, f"--mcp-config not_there.json: {NO_ANSWER}: No connection"),
    ("webhooks", {**RECEIVER, "webhook": "http://127.0.0.1/"}, "127.0.0.1 is not public: see --allow-address"),
    ("webhooks", {**RECEIVER, "webhook": "http://no.invalid/"}, "no.invalid is unknown here"),
    ("webhooks", {**RECEIVER, "api_key_file": "keys.txt"}, "10.0.0.1 is not public: see --allow-address"),
]
"""Further mistakes, which a server finds only when a response needs the tools."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("prompts").mkdir()
    Path("yaml").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("check", "settings", "message"), [*MISTAKES, *MISTAKES_ELSEWHERE])
def test_each_mistake_is_found_by_its_check(check: str, settings: dict[str, Any], message: str, capfd: Any) -> None:
    all_pass, lines = checked(capfd, **settings)
    assert not all_pass
    wrong = [name for name, line in lines.items() if line.startswith("wrong")]
    assert wrong == check.split()
    assert message in lines[wrong[0]]
    if check == "keys":
        assert lines["webhooks"] == "- not checked, as the row of the keys is wrong"


def checks_of(**settings: Any) -> Checks:
    return Checks(Settings.model_validate(SETTINGS | {"engine": []} | settings))


@pytest.mark.vllm
async def test_model_of_this_process_is_found_with_its_weights(tmp_path: Path) -> None:
    found = await checks_of(model=MODEL).model()
    assert re.fullmatch(rf"\d\.\d GiB of weights in {MODEL}", found)
    with pytest.raises(CannotStart, match="there is no such folder"):
        await checks_of(model=str(tmp_path / "nowhere")).model()
    with pytest.raises(CannotStart, match="there are no weights"):
        await checks_of(model=str(tmp_path)).model()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for dummy in (["--load-format=dummy"], ["--load_format", "dummy"]):
        assert await checks_of(model=str(tmp_path), engine_arguments=dummy).model()
    for elsewhere in ("nobody/has-it", "s3://bucket/folder/model", "nobody/has-it-GGUF:Q4_K_M"):
        assert await checks_of(model=elsewhere).model() == f"{elsewhere} is downloaded when the server starts"


WEIGHTS = {"model.safetensors": ""}

WRONG_MODELS: list[tuple[str, dict[str, str], str]] = [
    ("./models/nope", {}, "./models/nope: there is no such folder"),
    ("models/one/nope", {}, "models/one/nope: there is no such folder"),
    ("folder", {}, "folder: there are no weights in folder"),
    ("folder", {"config.json": '{"model_type": "qwen3"}'}, "folder: there are no weights in folder"),
    ("folder", WEIGHTS, "folder/config.json: No such file or directory"),
    ("folder", WEIGHTS | {"config.json": "{}"}, "folder/config.json: it has neither model_type nor architectures"),
    ("folder", WEIGHTS | {"config.json": "{"}, "folder/config.json: it is no JSON"),
]
"""Wrong models: MODEL, the files of the folder, and the beginning of the message."""


@pytest.mark.vllm
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("model", "files", "message"), WRONG_MODELS)
def test_wrong_model_ends_check_and_the_start_before_it_is_loaded(
    model: str, files: dict[str, str], message: str, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Path("folder").mkdir()
    for name, text in files.items():
        Path("folder", name).write_text(text)
    _, lines = checked(capfd, model=model, engine=[])
    assert lines["model"].startswith(f"wrong {message}")
    assert lines["pipeline"] == "- not checked, as the model is wrong"
    with caplog.at_level("INFO"), pytest.raises(CannotRun, match=f"^{re.escape(message)}"):
        main([model, "--store", "store.sqlite3", "--port", str(free_port())])
    assert (caplog.messages, Path("store.sqlite3").exists()) == ([], False)


WRONG_OPTIONS = {
    "--prot=8451": "--prot: there is no such option (did you mean --port?)",
    "--enable-auto-tool-choice": "--enable-auto-tool-choice: it is an option of vLLM's HTTP server: nothing is needed",
    "--enable-log-outputs": "--enable-log-outputs: it is an option of vLLM's HTTP server: use --log-outputs",
}


@pytest.mark.vllm
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("option", "message"), WRONG_OPTIONS.items())
def test_wrong_option_ends_the_start_at_once(option: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before a store is made, and a sandbox started."""
    with caplog.at_level("INFO"), pytest.raises(CannotRun, match=f"^{re.escape(message)}"):
        main([MODEL, option, "--store", "store.sqlite3"])
    assert not [record for record in caplog.records if record.name.startswith("penstock.")]
    assert not Path("store.sqlite3").exists()


def test_option_is_wrong_also_without_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _: None)
    with pytest.raises(CannotRun, match=r"^--prot: there is no such option \(did you mean --port\?\)$"):
        main(["--prot", "8451", "--store", "store.sqlite3"])
    assert not (folder / "store.sqlite3").exists()


async def test_receiver_of_webhooks_may_be_allowed(tmp_path: Path) -> None:
    receiver = {**RECEIVER, "store": str(tmp_path / "store.sqlite3"), "webhook": "http://localhost:9/hooks"}
    for allowed in (["localhost"], ["127.0.0.0/8", "::1"]):
        assert await checks_of(**receiver, allow_address=allowed).webhooks() == "to localhost"


@pytest.mark.vllm
async def test_vllm_of_this_process_is_named_beside_those_that_are_tested() -> None:
    assert re.fullmatch(
        r"0\.\d+\.\d+\+cpu; penstock is tested with 0\.32 and 0\.33", await checks_of(model=MODEL).vllm()
    )
    assert await checks_of(engine=SETTINGS["engine"]).vllm() == "none runs here"


@pytest.mark.parametrize("store_at", ["postgres"], indirect=True)
async def test_clock_is_that_of_the_database(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in ("none", store_at):
        async with checks_of(store=store) as checks:
            assert (await checks.clock()).endswith(" UTC")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 100)
    async with checks_of(store=store_at) as checks:
        with pytest.raises(CannotStart, match="are 100 s apart"):
            await checks.clock()


async def test_store_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counted(place: str) -> Database:
        opened.append(place)
        return database(place)

    monkeypatch.setattr(assembly, "database", counted)
    store = str(tmp_path / "store.sqlite3")
    settings = Settings.model_validate(SETTINGS | {"port": free_port(), "store": store, "store_keys": True})
    assert await passes(settings, ())
    assert opened == [store]


@contextmanager
def as_another_user() -> Iterator[None]:
    """Let the modes of files hold for the length of a block, which they do not for root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def private(folder: Path) -> Iterator[str]:
    """A folder, with keys in it, that this user cannot read."""
    private = folder / "private"
    private.mkdir()
    (private / "keys").write_text("sk-alice-0123456789\n")
    private.chmod(0)
    folder.chmod(0o755)
    with as_another_user():
        yield private.name
    private.chmod(0o700)


async def test_unreadable_files_are_named(private: str) -> None:
    """The user is not that of the service, to whom the files belong."""
    options = ["--store", f"{private}/store", "--api-key-file", f"{private}/keys", "--prompts", f"{private}/prompts"]
    async with Checks(read_settings([*options, "--engine", "http://a:1"], "check")) as checks:
        for name, named in (
            ("keys", "--api-key-file private/keys: Permission denied"),
            ("store", "private/store cannot be opened: .*Permission denied"),
            ("prompts", "--prompts private/prompts: Permission denied"),
        ):
            with pytest.raises((CannotStart, StoreFailed), match=named):
                await checks.all[name]()
    with pytest.raises(UnreadableRecording, match="private: it cannot be read: Permission denied"):
        read_recordings(Path(private))


async def test_user_is_named_beside_the_owner_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "folder" / "store.sqlite3")
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert await checks_of(store=store).user() == await checks_of().user() == user
    monkeypatch.setattr(check, "_owner", lambda _: "penstock")
    found = await checks_of(store=store).user()
    assert found == f"{user}; the store belongs to penstock: run this as penstock to find what that user cannot read"


async def test_root_makes_no_store_for_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_owner", lambda _: "penstock")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    store = tmp_path / "store.sqlite3"
    async with checks_of(store=str(store)) as checks:
        with pytest.raises(CannotStart, match="the folder belongs to penstock: run this as penstock"):
            await checks.store()
    assert not store.exists()


async def test_sandboxes_are_described() -> None:
    assert await checks_of().all["sandbox"]() == "off"
    described = await checks_of(sandbox=True).all["sandbox"]()
    assert re.match("(no )?python: .+; (no )?container: .+", described)


def test_tools_of_mcp_servers_are_counted(capfd: Any, tmp_path: Path) -> None:
    config = tmp_path / "mcp.json"
    config.write_text(mcp_server(**stdio_config("python")))
    _, lines = checked(capfd, mcp_config=config)
    assert lines["mcp"] == "ok clock (2 tools)"


def test_a_port_in_use_is_named(capfd: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _, lines = checked(capfd, port=port)
    assert lines["address"] == f"wrong --host 127.0.0.1 --port {port}: Address already in use"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("check", "settings", "message"), [each for each in MISTAKES if each[0] != "pipeline"])
async def test_a_server_does_not_start_its_engine_with_a_mistake(
    check: str, settings: dict[str, Any], message: str
) -> None:
    def start_engine(_: Settings) -> Any:
        raise AssertionError(f"the engine starts before {check} are checked")

    with pytest.raises(UNSTARTABLE, match=re.escape(message)):
        await serve(Settings.model_validate(SETTINGS | {"port": free_port()} | settings), start_engine)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("option", [("--mcp-config", "none.json"), ("--api-key-file", "keys")])
def test_the_pipeline_is_not_drawn_with_a_mistake(option: tuple[str, str], capfd: Any) -> None:
    with pytest.raises(CannotRun, match=f"{option[0]} {option[1]}: No such file"):
        main([*option, "--engine", SETTINGS["engine"][0], "--print-pipeline"])
    assert capfd.readouterr().out == ""


def test_the_password_of_a_database_is_not_shown() -> None:
    assert without_password("postgresql://me:secret@db.example/responses") == "postgresql://db.example/responses"
    in_query = "postgresql://db.example/responses?user=me&password=secret&ssl=require"
    assert without_password(in_query) == "postgresql://db.example/responses"
    assert without_password("responses.sqlite3") == "responses.sqlite3"
