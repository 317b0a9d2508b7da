from __future__ import annotations

import re

from tests.support.paths import ROOT

README = (ROOT / "tests" / "README.md").read_text()


def test_first_line_of_every_helper_module_says_what_it_is_for() -> None:
    modules = sorted((ROOT / "tests" / "support").glob("*.py"))
    first = {path.stem: path.read_text().partition("\n")[0] for path in modules if path.stem != "__init__"}
    assert [name for name, line in first.items() if not re.match(r'"""[\w`].{15}', line)] == []


def test_readme_names_every_folder() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/*.py")}
    assert folders == set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE))


def test_readme_names_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
