"""`docs/RECIPES.md`, which is made from the files beside this one; ``--regen`` writes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from penstock.pipeline.plugins import load
from penstock.stages.responses import recorded_responses
from tests.support.paths import ROOT
from tests.support.plugins import edit_of

PAGE = ROOT / "docs" / "RECIPES.md"
HERE = Path(__file__).parent
RECIPES = (
    *("redact_emails", "count_tokens", "guard_words", "route_by_content", "add_metadata", "translate_answers"),
    *("cache_answers", "log_to_queue", "share_state", "time_two_places", "summarize_own"),
)
NO_STAGES = (
    *("a_tool_of_your_own", "a_tool_through_mcp", "a_store_of_your_own", "a_dialect_of_your_own"),
    "a_parser_of_your_own",
)
SETTINGS = {"guard_words": {"words": ["swordfish"]}}
LONGEST = 41
"""The lines of code that the page shows of a file; it links a longer one."""

HEAD = """# Recipes

Each is a whole file: copy it, change it, and name it with `--with FILE.py:install`. [STAGES.md](STAGES.md) explains the
places where a stage can go, and [FRAMES.md](FRAMES.md) the frames. To try one without a model, run recorded responses
through it; `cache_answers.py` needs the [echo engine](ENGINES.md).

```sh
penstock replay fixtures/harmony/greeting --with redact_emails.py:install --sse
penstock serve --engine replay:fixtures/harmony --with redact_emails.py:install
```

This page is made from [tests/examples](../tests/examples), where each file has its test beside it.
"""


def title(name: str) -> str:
    return name.replace("_", " ").capitalize().replace("mcp", "MCP")


def section(name: str) -> str:
    source = (HERE / f"{name}.py").read_text()
    module = ast.parse(source)
    docstring = module.body[0].end_lineno
    code = "\n".join(source.splitlines()[docstring:]).strip()
    is_short = len([line for line in code.splitlines() if line]) <= LONGEST
    shown = (
        f"```python\n# {name}.py\n{code}\n```" if is_short else f"The file: [{name}.py](../tests/examples/{name}.py)."
    )
    return f"\n## {title(name)}\n\n{ast.get_docstring(module)}\n\n{shown}\n"


def test_page_shows_the_recipes(pytestconfig: pytest.Config) -> None:
    page = HEAD + "".join(map(section, (*RECIPES, *NO_STAGES)))
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
    shown = page + "".join((PAGE.parent / name).read_text() for name in ("ENGINES.md", "PROGRAMS.md"))
    assert [path.name for path in HERE.glob("*.py") if path.name not in shown and path.name[:5] != "test_"] == []


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_short_and_fits(name: str) -> None:
    assert f"```python\n# {name}.py\n" in section(name)
    install = load([f"tests.examples.{name}:install"], {name: SETTINGS[name]} if name in SETTINGS else {})
    edited = edit_of(install)(recorded_responses())
    assert set(edited.names()) >= set(recorded_responses().names())
