"""`api/SETTINGS.md`, which is made from the settings; ``--regen`` writes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import CLI_SUPPRESS

from penstock.api.settings import Settings
from tests.support.paths import ROOT

PAGE = ROOT / "api" / "SETTINGS.md"
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
