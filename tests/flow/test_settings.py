"""`api/SETTINGS.md` and the options in `api/FROM_VLLM.md`, which are made from the code; ``--regen`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from penstock.api.cli.vllm_options import ENVIRONMENT, INSTEAD, NEEDLESS
from penstock.api.settings import Settings
from tests.support.paths import ROOT

PAGE = ROOT / "api" / "SETTINGS.md"
FROM_VLLM = ROOT / "api" / "FROM_VLLM.md"
HEAD = """# Settings

```sh
penstock serve [MODEL] [options of penstock] [options of vLLM's engine]
```

Write MODEL first, or vLLM's options as `--name=value`. Each option of penstock is also an environment variable
(`PENSTOCK_KEEP_ALIVE`) and a key of `penstock.toml` in the working directory (`keep_alive = 15`). The command line
wins, then the environment.

This table is generated from `api/settings.py`.

| option | default | |
|---|---|---|
"""
TAIL = """
Options of vLLM that are worth knowing:

| option | |
|---|---|
| `--served-model-name` | any number of names for the model |
| `--enable-lora --lora-modules NAME=FOLDER` | adapters: each is a model of that name |
| `--max-model-len` | the longest context |
| `--max-num-queued-reqs` | after that many waiting requests clients get a 503 with Retry-After |
| `--tensor-parallel-size` | GPUs that share one model |

Secrets are no options, as every process of the machine can read a command line. They are environment variables:
`PENSTOCK_API_KEYS`, `PENSTOCK_ENGINE_KEY` and `PENSTOCK_WEB_SEARCH_KEY`.
"""
SHOWN = {
    "allow_tool": "all",
    "store": "`~/.local/share/penstock/responses.sqlite3`",
    "store_ttl": "30d",
    "stream_ttl": "1d",
    "max_body_bytes": "32 MiB",
    "replay_speed": "max",
    "record_after": "all",
    "default_chat_template_kwargs": "",
}
"""Defaults that are clearer in words than as values."""


def options() -> Iterator[tuple[str, str, FieldInfo]]:
    for name, field in Settings.model_fields.items():
        if name not in ("model", "engine_arguments") and CLI_SUPPRESS not in field.metadata:
            yield name, f"--{(field.alias or name).replace('_', '-')}", field


def default(name: str, field: FieldInfo) -> str:
    value = field.default
    if name in SHOWN:
        return SHOWN[name]
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else "" if value is None or value == [] else str(value)


def row(name: str, option: str, field: FieldInfo) -> str:
    switch = f"`{option}`, `--no-{option[2:]}`" if field.default is True else f"`{option}`"
    assert field.description, f"{option} has no description"
    return f"| {switch} | {default(name, field)} | {field.description} |\n"


def test_page_has_every_setting(pytestconfig: pytest.Config) -> None:
    page = HEAD + "".join(row(*option) for option in options()) + TAIL
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def with_tables(page: str) -> str:
    tables = {"### Left out": ("option", NEEDLESS), "### Refused": ("option", INSTEAD)}
    tables |= {"### Variables": ("variable", ENVIRONMENT)}
    for heading, (kind, table) in tables.items():
        rows = f"| {kind} | |\n|---|---|\n" + "".join(f"| `{option}` | {text} |\n" for option, text in table.items())
        before, after = page.split(heading)
        old = re.search(r"(^\|[^\n]*\n)+", after, re.MULTILINE)
        assert old, heading
        page = before + heading + after.replace(old[0], rows)
    return page


def test_page_has_every_option_that_is_left_out_or_refused(pytestconfig: pytest.Config) -> None:
    page = with_tables(FROM_VLLM.read_text())
    if pytestconfig.getoption("--regen"):
        FROM_VLLM.write_text(page)
    assert FROM_VLLM.read_text() == page


OF_VLLM = {
    *("--api-key", "--lora-modules"),
    *("--enable-lora", "--generation-config", "--limit-mm-per-prompt", "--max-model-len", "--max-num-queued-reqs"),
    *("--override-generation-config", "--structured-outputs-config", "--tensor-parallel-size"),
}
"""Options of vLLM's server, and of its engine, that the pages name."""


@pytest.mark.parametrize("page", ["FROM_VLLM.md", "README.md", "SECURITY.md"])
def test_other_options_on_a_page_exist(page: str) -> None:
    text = (ROOT / "api" / page).read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - NEEDLESS.keys() - INSTEAD.keys()
    ours = {option for _, option, _ in options()}
    assert {option.replace("--no-", "--") for option in named} - ours - OF_VLLM == set()


def test_words_of_the_api_on_the_page_are_in_the_code() -> None:
    """Codes, fields, events and types that the page says penstock has; those of vLLM alone stand in a column of it."""
    ours = re.sub(r"^(\|[^|]*\|)[^|]*(\|[^|]*\|[^|]*\|)$", r"\1\2", FROM_VLLM.read_text(), flags=re.MULTILINE)
    words = set(re.findall(r"`([a-z]+(?:[_.][a-z]+)+)(?:\.\*)?`", ours))
    code = "\n".join(path.read_text() for top in ("api", "pipeline", "stages") for path in (ROOT / top).rglob("*.py"))
    assert "response.queued" in words
    assert {word for word in words if not re.search(rf"\b{re.escape(word)}\b", code)} == set()
