"""Mistakes in the settings: each names its place and its cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.keys import main as keys
from penstock.api.cli.mistakes import explained, placed
from penstock.api.cli.serve import main
from penstock.api.values import listed
from penstock.pipeline.errors import CannotRun
from penstock.services.engines.vllm import WrongOption

ELSEWHERE = ("--engine", "http://a:8001")
ELSE = "; options of vLLM's engine belong to the engine's own server, as --engine names another one"
TYPO = "--keep-alvie: there is no such option (did you mean --keep-alive?)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where ``penstock.toml`` is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistake(*arguments: str) -> str:
    with pytest.raises(CannotRun) as refused:
        read_settings(arguments)
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--store-ttl", "week"), "--store-ttl: expected a duration, such as 30d, 12h, 5m or 90s, not 'week'"),
        (("--store_ttl=week",), "--store-ttl: expected a duration, such as 30d, 12h, 5m or 90s, not 'week'"),
        (("--port", "high"), "--port: Input should be a valid integer, unable to parse string as an integer, "
                             "not 'high', for example 8000"),
        (("--log-level", "LOUD"), "--log-level: Input should be 'DEBUG', 'INFO', 'WARNING' or 'ERROR', not 'LOUD'"),
        (("--port",), "--port: expected one argument"),
        (("--engine", "http://key@a"), "--engine: http://...@a must begin with http:// or https://, and name a host, "
                                       "or be file.py:function"),
        ((*ELSEWHERE, "--no-sandbx"), "--no-sandbx: there is no such option (did you mean --no-sandbox?)"),
        ((*ELSEWHERE, "tiny", "more"), "more: it is neither an option nor the value of one, and MODEL is there already"
                                       f"{ELSE}"),
        (("--default-chat-template-kwargs", "[1]"), "--default-chat-template-kwargs: Input should be a valid "
                                                    'dictionary, for example {"enable_thinking": false}'),
        (("--default-chat-template-kwargs", "{"), "--default-chat-template-kwargs: expected JSON: Expecting property "
                                                  "name enclosed in double quotes: line 1 column 2 (char 1)"),
        (
            ("--served-model-name", "foo", "fixtures/tiny_qwen"),
            "MODEL is read as 'foo', which follows --served-model-name: "
            "write MODEL first, or --served-model-name=foo",
        ),
        (
            ("--max-model-len", "2048", "--port", "1", "tiny"),
            "MODEL is read as '2048', which follows --max-model-len: write MODEL first, or --max-model-len=2048",
        ),
        (
            ("tiny", "--api-key=x", "--uds", "/a"),
            "--api-key: a command line shows its keys to all processes: use --api-key-file or PENSTOCK_API_KEYS",
        ),
        (("--model", "tiny"), "give MODEL as the first argument, or as model before the tables of penstock.toml"),
        ((*ELSEWHERE, "--keep-alvie", "3"), TYPO),
        pytest.param(
            (*ELSEWHERE, "--max_model_len=5", "--no-enable-lora"),
            f"--max-model-len: {ELSE[2:]}\n--no-enable-lora: {ELSE[2:]}",
            marks=pytest.mark.vllm,
        ),
        ((*ELSEWHERE, "--keep-alvie=3"), TYPO),
    ],
)  # fmt: skip
def test_wrong_option_is_named_with_its_cure(arguments: tuple[str, ...], message: str) -> None:
    assert mistake(*arguments) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PENSTOCK_STORE_TTL", "week", "PENSTOCK_STORE_TTL: expected a duration, such as 30d, 12h, 5m or 90s"),
        (
            "PENSTOCK_STORE_TLL",
            "7d",
            "PENSTOCK_STORE_TLL: there is no such variable (did you mean PENSTOCK_STORE_TTL?)",
        ),
        ("PENSTOCK_ENGINE_ARGUMENTS", "x", "PENSTOCK_ENGINE_ARGUMENTS: there is no such variable"),
        ("penstock_colour", "red", "penstock_colour: there is no such variable"),
        (
            "PENSTOCK_ENGINE",
            "a:8001",
            "PENSTOCK_ENGINE: a:8001 must begin with http:// or https://, and name a host, or be file.py:function",
        ),
        ("PENSTOCK_STAGES", "guard", "PENSTOCK_STAGES: expected JSON: Expecting value"),
        ("VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "cook", "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS: "),
    ],
)
def test_wrong_variable_is_named(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert mistake().startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '# A comment\nstore-ttl = "7 days"',
            "store-ttl (penstock.toml, line 2): expected a duration, such as 30d, 12h",
        ),
        (
            'stroe_ttl = "7d"',
            "stroe_ttl (penstock.toml, line 1): there is no such setting (did you mean store-ttl?). If",
        ),
        pytest.param(
            "max_model_len = 5",
            "max_model_len (penstock.toml, line 1): it is an option of vLLM's engine: move it into the table [vllm]",
            marks=pytest.mark.vllm,
        ),
        ('store_ttl = "7d"\nstore-ttl = "8d"', "penstock.toml: store-ttl and store_ttl are one setting"),
        (
            'host = "here"\nstore = 7d',
            "penstock.toml: Expected newline or end of document after a statement (at line 2",
        ),
        ("[vllm]\nmodel = 'x'", "give MODEL as the first argument, or as model before the tables of penstock.toml"),
        ("web-search = 'brave'", "web-search (penstock.toml, line 1) brave needs a key: set PENSTOCK_WEB_SEARCH_KEY"),
        (
            'with = "guard.py:install"\n[stages.guarb]\nwords = []',
            "stages (penstock.toml, line 2): no --with has the name guarb (did you mean guard?)",
        ),
        (
            'with = "guard.py:install"\n[stages.install]\nwords = []',
            "stages (penstock.toml, line 2): no --with has the name install: those are guard",
        ),
        (
            "[stages.guard]\nwords = []",
            "stages (penstock.toml, line 1): no --with has the name guard, as there is none",
        ),
        (
            '[stages.guard]\nwith = "guard.py:install"',
            "stages (penstock.toml, line 1): with stands in the table [stages.guard]: move it above all tables",
        ),
        ("stages.guard = 'xyzzy'", "stages (penstock.toml, line 1): Input should be a valid dictionary"),
        (
            "engine_arguments = []",
            "engine_arguments (penstock.toml, line 1): there is no such setting. If it is an option of vLLM, move",
        ),
    ],
)
def test_wrong_line_of_the_file_is_named(text: str, message: str, folder: Path) -> None:
    (folder / "penstock.toml").write_text(text)
    assert mistake().startswith(message)


def test_all_mistakes_are_named_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "penstock.toml").write_text("port = 'high'\nprot = 1")
    monkeypatch.setenv("PENSTOCK_HEARTBEAT", "slow")
    lines = mistake("--max-turns", "many").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "port (penstock.toml, line 1)",
        "PENSTOCK_HEARTBEAT",
        "--max-turns",
        "prot (penstock.toml, line 2)",
    ]


def test_mistakes_show_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "penstock.toml").write_text("engine-key = 5311\napi-key = 'secret-5311'")
    monkeypatch.setenv("PENSTOCK_WEB_SERCH_KEY", "secret-5311")
    monkeypatch.setenv("PENSTOCK_STAGES", '{"guard": "secret-5311"}')
    shown = mistake()
    assert "PENSTOCK_WEB_SERCH_KEY" in shown
    assert "PENSTOCK_STAGES" in shown
    assert "5311" not in shown


def test_mistake_is_named_once(folder: Path) -> None:
    (folder / "penstock.toml").write_text("api-keys = [1, 2, 3]")
    assert len(mistake().splitlines()) == len({*mistake().splitlines()})


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (
            ["--served-model-name", "foo"],
            "; MODEL is read as 'foo', which follows --served-model-name: "
            "write MODEL first, or --served-model-name=foo",
        ),
        (["foo", "--served-model-name"], ""),
    ],
)
def test_option_without_its_value_is_named_with_the_model_that_took_it(arguments: list[str], end: str) -> None:
    lacking = "argument --served-model-name: expected at least one argument"
    assert placed(lacking, arguments) == lacking + end


def test_setting_in_the_table_of_an_engine_elsewhere_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "penstock.toml").write_text("[vllm]\nkeep-alive = '3s'\nmax-model-len = 8")
    read_settings(["--engine", "http://a"])
    shown = capsys.readouterr().err
    assert shown.endswith("names another engine; keep-alive is a setting of penstock: move it above the table\n")


def test_switch_is_no_duration(folder: Path) -> None:
    (folder / "penstock.toml").write_text("keep-alive = true")
    assert mistake() == (
        "keep-alive (penstock.toml, line 1): expected a duration, such as 30d, 12h, 5m or 90s, not True"
    )


@pytest.mark.vllm
def test_misspelt_option_of_vllm_is_named_beside_an_engine_elsewhere() -> None:
    assert mistake(*ELSEWHERE, "--max-model-length=10").startswith(
        "--max-model-length: there is no such option (did you mean --max-model-len?)"
    )


def test_file_of_wrong_syntax_is_named(folder: Path) -> None:
    (folder / "penstock.toml").write_text("store = seven")
    assert mistake().endswith('; a text stands in quotes: store-ttl = "7d"')
    (folder / "penstock.toml").write_text("[vllm\n")
    assert "quotes" not in mistake()


def test_store_with_a_mistyped_scheme_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its password would become the name of a folder."""
    monkeypatch.setenv("PENSTOCK_STORE", "postgres//me:secret-5311@host/x")
    assert (
        mistake()
        == "PENSTOCK_STORE: give the path of a file, postgres://..., postgresql://..., file.py:function, or none"
    )


@pytest.mark.parametrize("store", ["store.py", "./own/store.py:open_store", "own.stores:open_store", "mysql:penstock"])
def test_store_of_ones_own_is_no_file(store: str) -> None:
    """``--engine`` and ``--with`` take such names, so that a file of that name would be a surprise."""
    with pytest.raises(CannotRun, match="--store "):
        keys(["list", "--store", store])
    assert list(Path().iterdir()) == []


def test_setting_of_several_forms_has_one_line(folder: Path) -> None:
    (folder / "penstock.toml").write_text("api-keys = 3")
    assert len(mistake().splitlines()) == 1


def test_model_after_a_switch_of_vllm_is_the_model() -> None:
    assert read_settings(["--enforce-eager", "tiny", "--port", "1"]).model == "tiny"
    assert read_settings(["--max-model-len=5", "tiny", "--lora-modules", "a=/a", "b=/b"]).model == "tiny"


def test_levels_are_read_in_any_case() -> None:
    assert read_settings(["tiny", "--log-level", "warning"]).log_level == "WARNING"


def test_file_takes_plain_texts_for_lists_dashes_and_options_of_vllm(folder: Path) -> None:
    (folder / "penstock.toml").write_text(
        """
        with = "shout.py:install"
        allow-origin = ["https://a", "https://b"]
        allow_host = "gpubox"
        store-ttl = "7d"
        keep_alive = 3
        [vllm]
        max-model-len = 4096
        enable_lora = true
        enable-prefix-caching = false
        lora-modules = ["a=/a", "b=/b"]
        compilation-config = {level = 3}
        """
    )
    settings = read_settings(["tiny", "--max_model_len", "8192", "--no-enable-lora"])
    assert (settings.with_, settings.allow_origin, settings.allow_host, settings.store_ttl, settings.keep_alive) == (
        ["shout.py:install"],
        ["https://a", "https://b"],
        ["gpubox"],
        7 * 86400,
        3,
    )
    assert settings.engine_options == [
        "--no-enable-prefix-caching",
        *("--lora-modules", "a=/a", "b=/b"),
        '--compilation-config={"level": 3}',
        *("--max_model_len", "8192", "--no-enable-lora"),
    ]


@pytest.mark.parametrize(
    ("value", "engines"),
    [
        ("http://a", ["http://a"]),
        ("http://a,http://b", ["http://a", "http://b"]),
        ('["http://a", "http://b"]', ["http://a", "http://b"]),
    ],
)
def test_list_in_a_variable_is_text_or_json(value: str, engines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ENGINE", value)
    assert read_settings([]).engine == engines


def test_address_in_brackets_is_no_json() -> None:
    assert listed("[::1], a") == ["[::1]", "a"]


def test_unknown_option_for_vllm_is_one_line_with_its_place(folder: Path) -> None:
    (folder / "penstock.toml").write_text("[vllm]\nmax-modellen = 3")
    typed = WrongOption("unrecognized arguments: --keep-alvie 3", ["--max-model-len"])
    assert explained(typed, ["--keep-alvie", "3"]) == (
        "--keep-alvie: there is no such option (did you mean --keep-alive?)"
    )
    in_file = WrongOption("unrecognized arguments: --max-modellen=3", ["--max-model-len"])
    assert explained(in_file, []) == (
        "max-modellen (penstock.toml, line 2): there is no such option (did you mean --max-model-len?)"
    )
    of_server = WrongOption("unrecognized arguments: --enable-auto-tool-choice", ())
    assert explained(of_server, []) == (
        "--enable-auto-tool-choice: it is an option of vLLM's HTTP server: nothing is needed: the model may always "
        "choose among the tools of a request (docs/FROM_VLLM.md)"
    )
    own = WrongOption("unrecognized arguments: --store-ttl=7d", ())
    above = "it is a setting of penstock: move it above the table"
    assert explained(own, []) == f"store-ttl in the table [vllm] of penstock.toml: {above}"
    key = WrongOption("unrecognized arguments: --api-key=x --fre b --uds=c", ["--free"])
    assert explained(key, []).splitlines() == [
        "--api-key: it is not vLLM's engine that checks keys: use --api-key-file or PENSTOCK_API_KEYS",
        "--fre: there is no such option (did you mean --free?)",
        "--uds: it is an option of vLLM's HTTP server: listen on an address of this machine by --host and --port "
        "(docs/FROM_VLLM.md)",
    ]
    value = WrongOption("argument --max-modellen: invalid value: 'x'", ())
    assert explained(value, []) == "argument max-modellen (penstock.toml, line 2): invalid value: 'x'"


def test_later_failure_names_the_place_of_its_option(folder: Path) -> None:
    (folder / "penstock.toml").write_text('engine = "replay:nowhere"\nwith = "nope.py:install"')
    with pytest.raises(CannotRun, match=r"^with \(penstock.toml, line 2\) nope.py:install: there is no file"):
        main(["--store", "none"])


def test_wrong_settings_of_a_stage_end_the_start(folder: Path) -> None:
    (folder / "guard.py").write_text(
        "from pydantic import BaseModel\nclass Settings(BaseModel):\n    words: list[str] = []\n"
        "def install(pipeline, settings: Settings): return pipeline\n"
    )
    (folder / "penstock.toml").write_text('engine = "replay:."\nwith = "guard.py:install"\n[stages.guard]\nwrods = []')
    problem = "wrods: there is no such setting (did you mean words?)"
    with pytest.raises(CannotRun) as ended:
        main(["--store", "none"])
    assert str(ended.value) == f"with (penstock.toml, line 2) guard.py:install: [stages.guard]: {problem}"


KEYS = "# ours\n\nsk-alice-0123456789 name=alice\nshort\nsk-bob-0123456789 names=bob\n"
NO_WORD = (
    "is not one word, or has a word after it that is none of name, team, limits, tools, models, webhook, record,"
    " expires"
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--api-key-file", "none"),
            "--api-key-file none: No such file or directory; to make it: penstock keys make NAME --file none",
        ),
        (
            ("--seal-key-file", "none"),
            "--seal-key-file none: No such file or directory; to make it: openssl rand -hex 32 > none",
        ),
        (("--limits", "none"), "--limits none: No such file or directory"),
        (("--prompts", "none"), "--prompts none: No such file or directory"),
        (
            ("--api-key-file", "keys"),
            f"--api-key-file keys: the key in line 4 has fewer than 16 characters; the key in line 5 {NO_WORD}",
        ),
        (("--limits", "keys"), "--limits keys: Expected '=' after a key in a key/value pair (at line 3, column 21)"),
    ],
)
def test_wrong_file_ends_the_start_as_a_wrong_option_does(folder: Path, options: tuple[str, str], message: str) -> None:
    """The command exits with status 2, for which systemd does not start it again."""
    (folder / "keys").write_text(KEYS)
    (folder / "keys").chmod(0o600)
    with pytest.raises(CannotRun) as ended:
        main([*ELSEWHERE, *options])
    assert str(ended.value) == message


def test_first_mistakes_of_a_long_file_are_named(folder: Path) -> None:
    (folder / "keys").write_text("short\n" * 9)
    with pytest.raises(CannotRun, match=r"line 5 has fewer than 16 characters; 4 more mistakes$"):
        main([*ELSEWHERE, "--api-key-file", "keys"])
