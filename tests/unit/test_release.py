"""The name and version of the release stand in ``pyproject.toml``; with ``--regen``, all files take them from there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.pipeline.distribution import DISTRIBUTION
from tests.support.paths import PRODUCT, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME, VERSION = PROJECT["name"], PROJECT["version"]
FILE = f"{NAME.replace('-', '_')}-{VERSION}"
"""The beginning of the names of the wheel and the source distribution."""

FORMS = {
    r"\b(penstock\w*-\d+\.\d+[\w.]*?)(?:-py3-none-any\.whl|(?:-images)?\.tar\.gz)": FILE,
    r"(?<![\w/.-])(penstock[\w-]*:\d[\d.]*)-(?:gpu|plain|cpu)\b": f"{NAME}:{VERSION}",
    r"\b(penstock[\w-]*)\[(?:cpu|gpu|kv-events)\]": NAME,
    r"(?:pip|tool) install (?:[^\n`]*[ '])?(penstock[\w-]*)(?=[ '`=@\[\n])": NAME,
    r"--from (\S+) penstock\b": NAME,
    r"/opt/(penstock-\d+\.\d+\.\d+)": f"penstock-{VERSION}",
    r"image\.title=(\S+)": NAME,
    r"image\.version=(\S+)": VERSION,
    r"^(?:appV|v)ersion: (.+)$": VERSION,
    r"app\.kubernetes\.io/version: \"(\d[\d.]*)\"": VERSION,
}
"""How files write the name, the version or both, by expressions whose group has to be that text."""

FILES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(path for top in (*PRODUCT, "docs") for suffix in ("md", "py") for path in (ROOT / top).rglob(f"*.{suffix}")),
        *(path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".png"),
    )
)


def of_release(text: str, written: Callable[[str], object] = lambda _: None) -> str:
    """Put the name and version of the release in place of others, and pass on each expression that is found."""
    for form, wanted in FORMS.items():

        def replaced(found: re.Match[str], form: str = form, wanted: str = wanted) -> str:
            written(form)
            start, end = (place - found.start() for place in found.span(1))
            return found[0][:start] + wanted + found[0][end:]

        text = re.sub(form, replaced, text, flags=re.MULTILINE)
    return text


def test_each_file_says_the_name_and_version_of_the_release(request: pytest.FixtureRequest) -> None:
    found, wrong = set[str](), list[Path]()
    for path in FILES:
        text = path.read_text()
        if (right := of_release(text, found.add)) != text:
            wrong.append(path.relative_to(ROOT))
            if request.config.getoption("--regen"):
                path.write_text(right)
    assert not wrong
    assert found == FORMS.keys()


def test_other_names_and_versions_are_found() -> None:
    assert (
        of_release("pip install 'dist/penstock-0.1.0-py3-none-any.whl[gpu]'")
        == f"pip install 'dist/{FILE}-py3-none-any.whl[gpu]'"
    )
    assert (
        of_release("`pip install penstock`, not `helm install penstock`")
        == f"`pip install {NAME}`, not `helm install penstock`"
    )
    assert of_release("image: penstock:0.1.0-gpu") == f"image: {NAME}:{VERSION}-gpu"
    assert of_release("install penstock[gpu]") == f"install {NAME}[gpu]"


def test_chart_and_code_have_the_name_of_the_distribution() -> None:
    (chart,) = (ROOT / "deploy" / "helm").iterdir()
    values: Any = yaml.safe_load((chart / "values.yaml").read_text())
    described: Any = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert {DISTRIBUTION, chart.name, described["name"], values["image"]["repository"]} == {NAME}


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix == ".md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_page_mixes_indexes(path: Path) -> None:
    """Pip takes the newest version of all indexes, so that a stranger's package of that name may come."""
    assert "--extra-index-url" not in path.read_text()


def test_the_newest_section_of_the_changelog_is_the_release() -> None:
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [version for version, _ in sections if version != "Unreleased"]
    assert versions[0] == VERSION
    assert all(date for version, date in sections if version != "Unreleased")
