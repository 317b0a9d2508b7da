"""`docs/PARSERS.md`, whose tables are made from the code; ``--regen`` writes it."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Collection, Iterable

import pytest

from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Sign
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "PARSERS.md"
COUNTS = ROOT / "tests" / "oracles" / "counts.csv"
TEMPLATES = ROOT / "tests" / "oracles" / "templates.toml"

HEAD = """# Parsers of chat models

Penstock selects the parsers of a chat model's reasoning and calls when it starts: its log names them and the reason,
and `penstock serve --print-pipeline MODEL` shows them.

## Agreement

`make oracles` [compares](../tests/README.md#oracles) with the outputs in the tests of other servers. Where penstock
reads otherwise, the verdict is `ours` (penstock is wrong), `theirs` (the other is) or `arguable`, with the reasons in
[`differences.toml`](../tests/oracles/differences.toml). [`counts.csv`](../tests/oracles/counts.csv) has the verdicts of
each family.

{agreement}
## Selection

* **Choice.** The first line of a table that fits is taken: the chat template has all texts of the line, and the model
  type (`model_type` in `config.json`) begins as the line says. The template of `--chat-template` comes first, then the
  model's own. Without a template the type alone decides.
* **Doubt.** A warning is logged if the model's own template shows another parser than the operator's, or if models of
  this type usually need another one. So is a template with tools that fits no line: calls are then text, and
  `--tool-call-parser` names a parser.
* **Options.** `--tool-call-parser` and `--reasoning-parser` name a parser of these tables or of vLLM, a parser of your
  own, or `none`. If a parser that vLLM reads does not fit the model, the server does not start; if it was selected, it
  is left out with a warning.
* **Your own.** `file.py:name`, `module:name` or an entry point of the group `penstock.parsers` is a `CallForm`, a
  `ThoughtForm`, or a function that takes an `OutputStart` and returns a `TextParser`. If both options name the same
  function, its reader reads the thoughts and the calls. A reader that fails leaves the rest of the output as text.
  After a reasoning parser of your own, vLLM's tool call parsers are not available.
  [The recipe](RECIPES.md#a-parser-of-your-own) has one of each.
* **Readers.** Penstock reads all families from a description of each (`stages/models/chat/forms.py`), but those marked
  (vLLM), and those that `--tool-parser-plugin` and `--reasoning-parser-plugin` register there.
* **Suffixes.** The vocabulary shows the suffix of Hunyuan's marks, such as `<think:opensource>`.
* **Without vLLM** (`pip install transformers jinja2`, no PyTorch) a model whose engine runs elsewhere is served if
  penstock reads it. Images are not read, and calls that only vLLM describes are held to a grammar only if they are
  required.

## What counts as a call

* A call needs the mark that begins it, its name, and what may follow the name. A mark in a sentence is text. A call
  without its mark (`<function=...>` without `<tool_call>`), and a call in a thought, count only if they are whole.
  Muse names the recipient of each message: its calls count in messages to a function alone.
* A value between two tags ends only before what may follow it: another parameter, the end of the call, or the end of
  the turn. So it may hold the tags themselves. A mark that ends calls and is a token of the vocabulary ends it, too.
* Values have the types of the function's schema, references and alternatives resolved. A value that does not fit stays
  as the model wrote it. A parameter without a name, or given again, is left out.
* A call whose last brackets or tags are missing is completed, and `penstock_harmony_repairs_total` counts it as
  `missing end`. A call that the model left open within a text or a value is `incomplete`, as is one whose arguments are
  no JSON object. The response is still `completed`. No tool runs with such a call.
* The marks of a call with nothing between them are dropped, and counted as `empty call`, even if they are a whole turn.
* A call of a function that the request does not declare is answered with an error that the model reads.
* What stands after the last turn mark of the prompt decides if the output begins in a thought. The mark of a call at
  the end of the prompt begins one.
"""


def code(texts: Iterable[str | None], between: str = "") -> str:
    """Return ``texts`` as code in a cell of a table; a text with backticks is put between two of them."""
    fenced = (f"`` {text} ``" if "`" in text else f"`{text}`" for text in texts if text)
    return between.join(fenced).replace("|", r"\|")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(*headings: str, rows: Iterable[str]) -> str:
    return "\n".join((row(*headings), "|---" * len(headings) + "|", *rows, ""))


def cells(sign: Sign, reader: str) -> tuple[str, ...]:
    opened = " and `<think>` at the end of a prompt" if sign.opens_thought else ""
    return (
        f"`{sign.parser}`{reader}",
        code(sign.marks, " and ") + opened,
        code((f"{each}…" for each in sign.types), ", "),
    )


VERDICTS = 4
"""The last columns of the counts: how many outputs have each verdict."""


def agreement() -> str:
    headings, *families = csv.reader(COUNTS.read_text().splitlines())
    sums = [sum(map(int, column)) for column in list(zip(*families, strict=True))[1:]]
    servers = zip(headings[1:-VERDICTS], sums, strict=False)
    verdicts = zip(headings[-VERDICTS:], sums[-VERDICTS:], strict=True)
    return (
        f"Outputs: {', '.join(f'{count:,} of {server}' for server, count in servers)}.\n"
        f"Verdicts: {', '.join(f'{count:,} {verdict}' for verdict, count in verdicts)}.\n"
    )


def signs(table: Iterable[Sign], own: Collection[str]) -> str:
    rows = (row(*cells(sign, "" if sign.parser in own else " (vLLM)")) for sign in table)
    return markdown_table("parser", "template has", "model type", rows=rows)


def templates() -> str:
    """Count the templates with tools or thoughts that other servers ship, and name those that no parser reads."""
    counts, unread = [], []
    for server, entries in tomllib.loads(TEMPLATES.read_text()).items():
        shown = {name: each for name, each in entries.items() if "type" in each and len(each) > 1}
        counts.append(f"{len(shown)} of {server}")
        unread += [
            f"* `{name}`: {why}\n" for name, each in shown.items() if "no parser reads" in (why := each.get("why", ""))
        ]
    assert len(unread) == 2
    return (
        f"Penstock reads the templates with tools or thoughts that other servers ship ({'; '.join(counts)}), by\n"
        f"[these parsers](../tests/oracles/templates.toml). Two are left:\n\n{''.join(unread)}"
    )


def page() -> str:
    return "\n".join(
        (
            HEAD.format(agreement=agreement()),
            "## Calls\n",
            signs(TOOL_CALLS, OWN_CALLS),
            "## Reasoning\n",
            signs(REASONING, OWN_THOUGHTS),
            "## Templates\n",
            templates(),
        )
    )


def test_each_case_is_counted_once() -> None:
    for _, *counts in list(csv.reader(COUNTS.read_text().splitlines()))[1:]:
        assert sum(map(int, counts[:-VERDICTS])) == sum(map(int, counts[-VERDICTS:]))


def test_page_is_made_from_the_code(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()
