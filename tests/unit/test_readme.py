from __future__ import annotations

import re

from tests.support.paths import ROOT

README = (ROOT / "tests" / "README.md").read_text()


def test_readme_names_every_helper_module() -> None:
    modules = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", README))


def test_readme_names_every_folder() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/*.py")}
    assert folders == set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))


def test_readme_names_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
