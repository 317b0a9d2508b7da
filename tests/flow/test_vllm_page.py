"""`docs/VLLM.md`, whose table is made from the code; ``--regen`` writes it."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from penstock.stages.models.vllm_private import ENGINE_PARTS, PARSER_PARTS, SCHEDULER_PARTS, TESTED, PrivatePart
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "VLLM.md"
MARK = "<!-- parts -->\n"
RELEASES = re.findall(r"^\| ([0-9.]+) \|", PAGE.read_text(), re.MULTILINE)


def row(part: PrivatePart) -> str:
    names = ", ".join(f"`{name}`" for name in part.attributes)
    return f"| `{part.module}.{part.owner}` | {names} | {part.purpose} |"


def test_page_lists_the_parts(pytestconfig: pytest.Config) -> None:
    text = PAGE.read_text().partition(MARK)[0]
    rows = [
        "| part | its names | what penstock does with it |",
        "|---|---|---|",
        *map(row, (*ENGINE_PARTS, *PARSER_PARTS, *SCHEDULER_PARTS)),
    ]
    page = text + MARK + "\n".join(rows) + "\n"
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_extra_permits_the_releases_of_the_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (gpu,) = map(Requirement, extras["gpu"])
    assert tuple(release.rpartition(".")[0] for release in RELEASES) == TESTED
    assert [*gpu.specifier.filter([*RELEASES, "0.31.9", "0.34.0"])] == RELEASES
