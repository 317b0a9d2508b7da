from __future__ import annotations

import json
import pickle
import re
import shlex
import signal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.mistakes import explained
from penstock.api.cli.serve import greeting, main
from penstock.api.limits.admission import Admission
from penstock.api.settings import Settings
from penstock.api.settings.from_vllm import INSTEAD, VARIABLES
from penstock.api.settings.sources import flags, unknown_option
from penstock.api.start.assembly import keys_of
from penstock.pipeline.errors import CannotRun
from penstock.services.engines import vllm
from penstock.services.engines.vllm import WrongOption, check_memory, option_names, plan_vllm
from tests.support.paths import TINY_QWEN
from tests.support.vllm_source import SOURCES, VllmSource


@pytest.mark.parametrize("variable", VARIABLES)
def test_variable_of_vllm_is_named_with_what_holds_instead(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PENSTOCK_API_KEYS", "a-key-of-sixteen-or-more")
    assert read_settings(["tiny"]).has_keys
    assert capsys.readouterr().err == f"penstock: {variable} has no effect: {VARIABLES[variable]}\n"


def test_variables_of_vllm_are_named_in_one_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("PENSTOCK_API_KEYS", "a-key-of-sixteen-or-more")
    read_settings(["tiny"])
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == list(VARIABLES)


def test_key_of_vllm_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator believes that each request needs it."""
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-sixteen-or-more")
    with pytest.raises(CannotRun, match="use PENSTOCK_API_KEYS or --api-key-file"):
        read_settings(["tiny"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--host", "0.0.0.0"),
        ("--host", "::"),
        ("--host", "gpubox"),
        ("--trusted-proxy", "127.0.0.1"),
        ("--allow-host", "llm.example.com"),
    ],
)
def test_option_that_opens_the_server_to_other_machines_is_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read_settings([option, value])
    assert capsys.readouterr().err == (
        f"penstock: {option}: other machines can use this server without a key; "
        "to have it need a key, set PENSTOCK_API_KEYS or --api-key-file\n"
    )
    read_settings(["--host", "127.0.0.1"])
    read_settings([option, value, "--api-key-file", "keys"])
    assert not capsys.readouterr().err


def test_files_of_keys_that_others_can_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys, settings = Path("keys"), Path("penstock.toml")
    keys.touch()
    settings.write_text('api-key-file = "keys"\nengine-key = "of-the-engine"')
    for mode, names in ((0o600, []), (0o640, ["keys", "penstock.toml"]), (0o604, ["keys", "penstock.toml"])):
        keys.chmod(mode)
        settings.chmod(mode)
        read_settings([])
        assert re.findall(r"penstock: (\S+) holds keys, and other users", capsys.readouterr().err) == names


@pytest.mark.vllm
def test_variables_are_those_of_vllm() -> None:
    from vllm.envs import environment_variables  # noqa: PLC0415  (takes seconds)

    assert environment_variables.keys() >= VARIABLES.keys()


WITH_EFFECT = {
    "VLLM_CPU_KVCACHE_SPACE": "the engine reads it",
    "VLLM_MAX_N_SEQUENCES": "the engine reads it",
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "a setting of this server",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": "a setting of this server",
    "VLLM_USE_RUST_BENCH": "vllm bench reads it",
}


@pytest.mark.vllm
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.folder.parent.name))
def test_each_variable_of_the_http_server_of_vllm_is_known(source: VllmSource) -> None:
    """A variable without a word would be without its effect, and the operator would not learn it."""
    files = [*source.folder.joinpath("entrypoints").rglob("*.py")]
    read = {name for file in files for name in re.findall(r"envs\.(VLLM_\w+)", file.read_text())}
    assert {"VLLM_API_KEY", "VLLM_SKIP_MODEL_NAME_VALIDATION"} <= read
    assert read - VARIABLES.keys() - WITH_EFFECT.keys() == set()


@pytest.mark.vllm
def test_each_option_of_the_http_server_of_vllm_is_known() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  (takes seconds)
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    place = "common" if find_spec("vllm.entrypoints.common.cli_args") else "launchers"  # the latter in vLLM 0.32
    make_arg_parser: Any = import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser

    def options(parser: FlexibleArgumentParser) -> set[str]:
        """The first name of each option; the others switch it off, by words that differ between releases."""
        return {action.option_strings[0] for action in parser._actions if action.option_strings}

    engine = options(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))
    switches = options(make_arg_parser(FlexibleArgumentParser())) - engine
    ours = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {"--lora-modules", "--api-key"}
    others = switches - ours
    assert others - INSTEAD.keys() == set()
    known = [*flags(Settings.model_fields), *engine]
    for option in others:  # a name that is like another option is no advice
        message = f"it is an option of vLLM's HTTP server: {INSTEAD[option]} (docs/FROM_VLLM.md)"
        for typed in (option, f"{option}=1", f"--no-{option.removeprefix('--')}", f"--{option[2:].replace('-', '_')}"):
            assert unknown_option(typed, known) == message


@pytest.mark.vllm
def test_options_that_are_not_taken_are_none_of_the_engine() -> None:
    assert INSTEAD.keys() & option_names() <= {"--enable-log-requests"}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-modellen", "3"], "--max-modellen: there is no such option (did you mean --max-model-len?)"),
        (["--max-model-len", "long"], "argument --max-model-len: invalid "),
    ],
)
def test_wrong_option_of_vllm_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(WrongOption) as refused:
        plan_vllm("tiny", arguments)
    shown = explained(refused.value, arguments)
    assert shown.startswith(message)
    assert "\n" not in shown


@pytest.mark.parametrize("is_installed", [pytest.param(True, marks=pytest.mark.vllm), False])
def test_unknown_option_ends_the_start_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, *, is_installed: bool
) -> None:
    """Its cost is that of reading the command line: nothing of vLLM is imported."""
    if not is_installed:
        for module in ("command_line", "mistakes"):
            monkeypatch.setattr(f"penstock.api.cli.{module}.option_names", frozenset, raising=False)
        monkeypatch.setattr("penstock.api.start.backends.find_spec", lambda _: None)
    monkeypatch.setattr("penstock.api.start.backends.check_arguments", None)
    for arguments in (
        ["--prot", "3"],
        ["tiny", "--max-model-len", "3", "--prot=3"],
        ["--engine", "http://a", "--prot"],
    ):
        with pytest.raises(CannotRun, match=r"^--prot: there is no such option \(did you mean --port\?\)$"):
            read_settings(arguments)
    assert read_settings(["tiny", "--max-model-len", "3", "--no-sandbox", "--enforce-eager"]).model == "tiny"


@pytest.mark.vllm
@pytest.mark.parametrize("written", ["-tp=2", "--no-enable-lora", "--max-num-se=3", "--compilation-config.mode=3"])
def test_option_of_vllm_is_known_however_it_is_written(written: str) -> None:
    assert read_settings(["tiny", written]).engine_options == [written]


@pytest.mark.vllm
@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_option_may_be_that_of_a_plugin_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str) -> None:
    asked = list[list[str]]()
    monkeypatch.setattr("penstock.api.start.backends.check_arguments", lambda options: asked.append([*options]))
    with pytest.raises(CannotRun, match="--of-plugin: there is no such option"):
        read_settings(["tiny", "--of-plugin"])
    package = tmp_path / "vllm_more-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-more\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[{group}]\nmore = more:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    read_settings(["tiny", "--of-plugin"])
    assert asked == [["--of-plugin"]]


@pytest.mark.vllm
def test_cpu_without_memory_for_the_defaults_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=23 << 30, available=5 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(vllm, "memory_nodes", lambda: 1)
    small = ["--kv-cache-memory-bytes", "2"]
    check_memory(plan_vllm(str(TINY_QWEN), small).config.cache_config)
    whole = plan_vllm(str(TINY_QWEN), []).config.cache_config
    with pytest.raises(WrongOption, match=r"21\.2 GiB of the 23\.0 GiB of this machine, and 5\.0 GiB are free"):
        check_memory(whole)
    memory.available = 22 << 30
    check_memory(whole)


@pytest.mark.vllm
def test_options_of_vllm_are_found_in_its_source() -> None:
    with pytest.raises(WrongOption) as refused:
        plan_vllm("tiny", ["--nope"])
    assert {*refused.value.known} <= option_names()


@pytest.mark.parametrize("option", ["-v", "--verbose"])
def test_verbose_has_a_short_form(option: str) -> None:
    assert read_settings(["tiny", option]).verbose


@pytest.mark.parametrize(
    ("example", "body"),
    [
        (None, {"model": "tiny", "input": "Say hello.", "stream": True}),
        (("weather", "It's “hot”\n'"), {"model": "weather", "input": "It's “hot”\n'", "stream": True}),
    ],
)
def test_first_request_to_try_can_be_pasted_into_a_shell(
    example: tuple[str, str] | None, body: dict[str, object]
) -> None:
    message = greeting(read_settings([]), 8000, ("tiny", "weather"), example)
    assert message.startswith("Serving tiny at http://127.0.0.1:8000/v1.")
    command = shlex.split(message.split("Try:")[1].split("or open")[0])
    assert json.loads(command[command.index("-d") + 1]) == body


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("gpubox", "gpubox")]
)
def test_greeting_names_a_url_that_this_machine_reaches(host: str, url: str) -> None:
    """A port of 0 is one that the system chooses."""
    message = greeting(read_settings(["--host", host, "--port", "0"]), 4711, ("tiny",))
    assert message.startswith(f"Serving tiny at http://{url}:4711/v1.")
    assert f"curl -N http://{url}:4711/v1/responses" in message
    assert f"or open http://{url}:4711 in a browser" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_live_page_is_printed_with_a_key_of_this_run(host: str) -> None:
    """Each run has its own, which frontends get with the settings."""
    runs = [read_settings(["--live", "--host", host]) for _ in range(2)]
    keys = [run.operator_key.get_secret_value() for run in runs if run.operator_key]
    assert len({*keys}) == 2
    for run, key in zip(runs, keys, strict=True):
        message = greeting(pickle.loads(pickle.dumps(run)), 8000, ("tiny",))
        assert message.endswith(f"{run.url(8000)}/live#key={key}\n")
        assert keys_of(run, Admission()).have_operator


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "gpubox", "192.168.1.7", "127.0.0.1.evil.example"])
def test_no_key_is_made_where_other_machines_reach_the_server(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = read_settings(["--live", "--host", host])
    assert settings.operator_key is None
    assert "/live" not in greeting(settings, 8000, ("tiny",))
    assert "--live has no effect" in capsys.readouterr().err


def test_key_that_the_operator_has_set_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_OPERATOR_KEY", "a-key-of-sixteen-or-more")
    assert greeting(read_settings(["--live"]), 8000, ("tiny",)).endswith(":8000/live\n")
    assert "/live" not in greeting(read_settings([]), 8000, ("tiny",))


@pytest.mark.io
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_the_start_imports_is_a_clean_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stopped.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    with pytest.raises(SystemExit) as ended:
        main(["tiny", "--with", "stopped.py:install"])
    assert ended.value.code == 0
