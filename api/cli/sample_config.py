"""Config: print a penstock.toml with all settings and their defaults."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from penstock.api.cli.arguments import Parser
from penstock.api.settings.engine_settings import DEFAULT_MODEL
from penstock.api.settings.model_settings import OF_PROCESS, SHARED, ModelTable
from penstock.api.settings.options import Option, options

_HEAD = f"""\
# The settings of penstock serve, with their defaults. Keep the lines that you change, in penstock.toml in the working
# directory. A variable (PENSTOCK_STORE_TTL) wins over this file, and an option (--store-ttl) over both.
# Keys belong into the environment: PENSTOCK_API_KEYS, PENSTOCK_OPERATOR_KEY, PENSTOCK_SEAL_KEYS, PENSTOCK_METRICS_KEY,
# PENSTOCK_ENGINE_KEY, PENSTOCK_SHADOW_KEY, PENSTOCK_EMBEDDINGS_KEY, PENSTOCK_WEB_SEARCH_KEY and
# PENSTOCK_WEBHOOK_SECRET.

# model = "{DEFAULT_MODEL}"
"""
_TAIL = """
# Settings of stages of your own, each in a table with the name of its file, module or entry point.
[stages]
# shout = { words = ["hello"] }

# Several models: a table for each, with an engine, a command, or the model that vLLM runs in this process. These are
# the keys of models alone; those above of an engine and of models with a chat template may stand in a table as well.
# Beside tables of models there is no model, engine or kv-events above.
[models]
MODELS
# Options of vLLM's engine in this process, as on its command line. Tables are last.
[vllm]
# max-model-len = 8192
# enable-lora = true
# lora-modules = ["name=folder"]
"""


def main(arguments: Sequence[str]) -> None:
    """Print a penstock.toml with all settings and their defaults."""
    Parser(prog="penstock config", description=__doc__).parse_args(arguments)
    print(sample(), end="")


def sample() -> str:
    """Return the file.  A setting without a default is a comment, with an example."""
    return _HEAD + "".join(_lines()) + _TAIL.replace("MODELS\n", f"{''.join(_lines_of_models())}\n")


def _lines() -> Iterator[str]:
    for section, members in groupby(options(), lambda option: option.section):
        yield f"\n## {section}\n"
        for option in members:
            yield f"\n{textwrap.fill(option.description, 110, initial_indent='# ', subsequent_indent='# ')}\n"
            yield _line(option)


def _lines_of_models() -> Iterator[str]:
    """Yield two models as comments, one at an engine, and one with a command."""
    own = [name for name in ModelTable.model_fields if name not in SHARED]
    of_process = ["command", *OF_PROCESS]
    yield '#     [models.big]\n#     engine = ["http://127.0.0.1:8001"]\n'
    yield from (_line_of_model(name) for name in own if name not in of_process)
    yield "#     [models.small]\n"
    yield from (_line_of_model(name) for name in of_process)


def _line_of_model(name: str) -> str:
    field = ModelTable.model_fields[name]
    about = textwrap.fill(str(field.description), 105, initial_indent="#     # ", subsequent_indent="#     # ")
    return (
        f"{about}\n#     {name.replace('_', '-')} = {_toml(field.examples[0] if field.examples else field.default)}\n"
    )


def _line(option: Option) -> str:
    if option.default is None:
        return f"# {option.key} = {_toml(option.example)}\n"
    example = f"  # for example {_toml(option.example)}" if option.default in ([], {}) else ""
    return f"{option.key} = {_toml(option.default)}{example}\n"


def _toml(value: Any) -> str:
    """Return a value as TOML, which has JSON's texts, numbers, lists and truth values."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
