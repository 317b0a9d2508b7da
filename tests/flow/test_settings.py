"""`docs/SETTINGS.md` and the variables in `docs/FROM_VLLM.md`, made from the code; ``--regen`` writes them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_settings import CliApp

from penstock.api.cli.command_line import read_settings
from penstock.api.cli.sample_config import sample
from penstock.api.settings import Settings
from penstock.api.settings.from_vllm import INSTEAD, OPTIONS, VARIABLES
from penstock.api.settings.options import ALL, NEEDED, SECTIONS, Option, options
from penstock.pipeline.errors import CannotRun
from tests.support.paths import PRODUCT, ROOT

PAGE = ROOT / "docs" / "SETTINGS.md"
FROM_VLLM = ROOT / "docs" / "FROM_VLLM.md"
KEYS = [option.key for option in options()]
HEAD = """# Settings

```sh
penstock serve [MODEL] [options of penstock] [options of vLLM]
```

NEEDED

Write MODEL first, or vLLM's options as `--name=value`. Each option of penstock is also an environment variable
(`PENSTOCK_KEEP_ALIVE`) and a key of `penstock.toml` in the working directory (`keep-alive = "15s"`, or `keep_alive`).
The command line wins, then the environment. Times are `30d`, `12h`, `5m` or `90s`; a number alone is seconds.
Repeatable options are a list in the file (`with = ["a.py:install", "b.py:install"]`); in a variable, commas separate
the entries.

```sh
penstock config > penstock.toml    # all settings with their defaults and explanations
```

Options of vLLM's engine stand in the table `[vllm]` at the end of the file; those of the command line win. The table
has no effect if `--engine` names an engine elsewhere.

```toml
store-ttl = "7d"

[vllm]
max-model-len = 8192
enable-lora = true
lora-modules = ["legal=/models/legal"]
```

[Stages of your own](STAGES.md#settings-of-a-stage) have a table each, `[stages.NAME]`, and so have
[several models](MANY_MODELS.md), `[models.NAME]`.

A mistake ends the start, and its message names the place where it was made. Unknown keys of the file are mistakes, and
so are unknown variables that begin with `PENSTOCK_`. Kubernetes sets such variables for a service of the name
`penstock`: turn them off by `enableServiceLinks: false`. Settings that have no effect with the engine that answers are
no mistakes: the log names them at the start.

Defaults stand in brackets.
"""
TAIL = """
Some options of vLLM that operators often need:

| option | |
|---|---|
| `--served-model-name` | any number of names for the model |
| `--enable-lora --lora-modules NAME=FOLDER` | adapters: each is a model of that name |
| `--max-model-len` | the longest context |
| `--max-num-queued-reqs` | after that many waiting requests clients get a 503 with Retry-After |
| `--tensor-parallel-size` | GPUs that share one model |

Secrets are no options, as every process of the machine can read a command line. They are environment variables:
`PENSTOCK_API_KEYS`, `PENSTOCK_OPERATOR_KEY`, `PENSTOCK_SEAL_KEYS`, `PENSTOCK_METRICS_KEY`, `PENSTOCK_ENGINE_KEY`,
`PENSTOCK_SHADOW_KEY`, `PENSTOCK_EMBEDDINGS_KEY`, `PENSTOCK_WEB_SEARCH_KEY` and `PENSTOCK_WEBHOOK_SECRET`.
"""


def of_help() -> str:
    most = ", ".join(f"`--{key}`" for key in NEEDED)
    return fill(
        f"`penstock serve --help` shows what most operators need: MODEL, {most}. `--help all` shows all options, and "
        "`--help store` those with `store` in their name or group.",
        115,
        break_on_hyphens=False,
    )


def options_list(section: str, members: Iterable[Option]) -> str:
    lines = (f"* {', '.join(f'`{flag}`' for flag in each.flags)}{shown(each)}: {each.description}" for each in members)
    return "\n".join((f"\n## {section}\n", *lines, ""))


def shown(option: Option) -> str:
    text = option.default_text
    return f" ({f'`{text}`' if '/' in text else text})" if text else ""


def test_page_has_every_setting(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    sections = groupby(options(), lambda option: option.section)
    page = (
        HEAD.replace("NEEDED", of_help())
        + "".join(options_list(section, members) for section, members in sections)
        + TAIL
    )
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_each_option_has_a_section_a_description_and_an_example() -> None:
    assert list(dict.fromkeys(SECTIONS.values())) == [
        section for section, _ in groupby(option.section for option in options())
    ]
    for option in options():
        assert option.section, option.key
        assert option.description, option.key
        assert option.example not in (None, [], {}), option.key
        assert option.kind != "N" or "int" in str(option.field.annotation), f"{option.key} needs a title"


def test_each_setting_is_declared_in_one_part() -> None:
    parts = [vars(part) for part in Settings.__mro__ if "SECTION" in vars(part)]
    declared = [name for part in parts for name in part["__annotations__"] if name != "SECTION"]
    assert sorted(declared) == sorted(Settings.model_fields)


def settings_from(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    (folder / "penstock.toml").write_text(text)
    return CliApp.run(Settings, cli_args=[]).model_dump()


def test_no_part_replaces_a_validator_of_another() -> None:
    """A validator of the same name would: the settings inherit from all parts."""
    parts = [part.__pydantic_decorators__ for part in Settings.__bases__ if issubclass(part, BaseModel)]
    names = [name for part in parts for name in (*part.field_validators, *part.model_validators)]
    assert len(names) == len(set(names))


def test_sample_file_is_valid_and_holds_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = settings_from("", tmp_path, monkeypatch)
    assert settings_from(sample(), tmp_path, monkeypatch) == defaults
    keys = {
        key.replace("-", "_") for key in tomllib.loads(re.sub(r"^# (?=[a-z-]+ = )", "", sample(), flags=re.MULTILINE))
    }
    assert keys == {option.key.replace("-", "_") for option in options()} | {"model", "models", "stages", "vllm"}


def test_examples_of_the_sample_file_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", "s")  # secrets are not in the file
    text = re.sub(r"^# (?=[a-z-]+ = )(?!model-config)", "", sample(), flags=re.MULTILINE)  # it leaves no MODEL
    text = re.sub(r"^(\S+) = .*  # for example (.*)$", r"\1 = \2", text, flags=re.MULTILINE)
    settings = settings_from(text, tmp_path, monkeypatch)
    assert (settings["allow_host"], settings["max_log_len"]) == (["gpubox"], 1000)


def test_help_has_types_and_defaults_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["-h", ALL])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--store-ttl TIME time for which responses are stored (default: 30d)" in shown
    assert not re.search(r"\[str|null|lambda|2592000|\bNone\b", shown)


def flags_of(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> list[str]:
    """The options that the help of a command shows."""
    with pytest.raises(SystemExit) as ended:
        read_settings(words, command)
    assert ended.value.code == 0
    return re.findall(r"^  (?:-\w(?: \S+)?, )?--([a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_shows_what_most_need_and_all_if_asked(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert len(NEEDED) == 10
    for words in (["--help"], ["tiny", "-h"], ["--help", "--port", "1"]):
        assert flags_of(capsys, command, *words) == ["help", *NEEDED]
    every = ["help", *KEYS]
    for words in (["--help", ALL], [f"--help={ALL}"], ["tiny", "-h", ALL]):
        assert flags_of(capsys, command, *words) == every


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("prefix", {"share-caches", "salt-caches"}),
        ("--METRICS_port", {"metrics-port"}),
        ("webhook", {"webhook"}),
        ("record-", {"record-after", "record-if", "record-logprobs", "record-texts"}),
    ],
)
def test_help_finds_options_by_name_or_group(capsys: pytest.CaptureFixture[str], word: str, found: set[str]) -> None:
    assert flags_of(capsys, "serve", f"--help={word}") == ["help", *(key for key in KEYS if key in found)]


def test_help_without_an_option_says_so() -> None:
    with pytest.raises(CannotRun, match=r"^--help teapot: no option and no group has this in its name; --help all "):
        read_settings(["--help", "teapot"])


def with_table(page: str, heading: str, table: str) -> str:
    """The page with another table as the first one after a heading."""
    before, heading, after = page.partition(heading)
    old = re.search(r"(^\|[^\n]*\n)+", after, re.MULTILINE)
    assert old
    return before + heading + after.replace(old[0], table)


def as_code(text: str) -> str:
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]+)", r"`\1`", text)


NEEDLESS = "nothing is needed"


def test_page_has_everything_without_effect(pytestconfig: pytest.Config) -> None:
    by_text: dict[str, list[str]] = {}
    for variable, text in VARIABLES.items():
        by_text.setdefault(text, []).append(f"`{variable}`")
    variables = "".join(f"| {', '.join(names)} | {text} |\n" for text, names in by_text.items())
    needless = (name for names, text in OPTIONS.items() if text.startswith(NEEDLESS) for name in names.split())
    options = "".join(
        f"| {', '.join(f'`{name}`' for name in names.split())} | {as_code(text)} |\n"
        for names, text in OPTIONS.items()
        if not text.startswith(NEEDLESS)
    )
    options += (
        f"| {', '.join(f'`{name}`' for name in needless)} | nothing is needed; the error of the start says why |\n"
    )
    page = with_table(FROM_VLLM.read_text(), "### Variables", f"| variable | |\n|---|---|\n{variables}")
    page = with_table(page, "### Instead of the other options", f"| option | instead |\n|---|---|\n{options}")
    if pytestconfig.getoption("--regen"):
        FROM_VLLM.write_text(page)
    assert FROM_VLLM.read_text() == page


OF_VLLM = {
    *("--api-key", "--enable-sleep-mode", "--gpu-memory-utilization", "--lora-modules", "--max-logprobs"),
    *("--enable-lora", "--generation-config", "--limit-mm-per-prompt", "--max-model-len", "--max-num-queued-reqs"),
    "--logprobs-mode",
    *("--max-num-seqs", "--otlp-traces-endpoint", "--override-generation-config", "--served-model-name"),
    *("--reasoning-config", "--structured-outputs-config", "--tensor-parallel-size"),
    *("--block-size", "--data-parallel-size", "--distributed-executor-backend", "--kv-cache-memory-bytes"),
    *("--kv-events-config", "--prefix-cache-retention-interval", "--scheduler-cls", "--scheduling-policy"),
}
"""Options of vLLM's server, and of its engine, that the pages name."""

OF_COMMANDS = {
    *("--model", "--small-model", "--file", "--limits", "--tools", "--expires", "--json", "--sse", "--to"),
    *("--api", "--by", "--csv", "--key", "--since", "--team", "--until", "--in-order"),
    *("--form", "--prove", "--session", "--tolerance"),
}
"""Options of ``penstock batch``, ``keys``, ``launch``, ``replay``, ``rollouts`` and ``usage``, and of ``make load``."""

OF_OTHERS = {
    *("CLIENTS.md", "COMPARE.md", "COMPARING.md", "CONFORMANCE.md", "INSTALL.md", "MANY_GPUS.md"),
    *("RECORD.md", "RECORDINGS.md", "SETTINGS.md"),
}
"""Pages that name options of clients, pip, other servers or commands, or that are made from the options themselves."""

NAMING_OPTIONS = [
    ROOT / "SECURITY.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in OF_OTHERS),
]


@pytest.mark.parametrize("page", NAMING_OPTIONS, ids=lambda page: page.name)
def test_other_options_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - INSTEAD.keys()
    ours = {option.flag for option in options()}
    assert {option.replace("--no-", "--") for option in named} - ours - OF_VLLM - OF_COMMANDS == set()


def test_words_of_the_api_on_the_page_are_in_the_code() -> None:
    """Codes, fields, events and types that the page says penstock has; those of vLLM alone stand in a column of it."""
    ours = re.sub(r"^(\|[^|]*\|)[^|]*(\|[^|]*\|[^|]*\|)$", r"\1\2", FROM_VLLM.read_text(), flags=re.MULTILINE)
    words = set(re.findall(r"`([a-z]+(?:[_.][a-z]+)+)(?:\.\*)?`", ours))
    code = "\n".join(path.read_text() for top in PRODUCT for path in (ROOT / top).rglob("*.py"))
    assert "response.queued" in words
    assert {word for word in words if not re.search(rf"\b{re.escape(word)}\b", code)} == set()
