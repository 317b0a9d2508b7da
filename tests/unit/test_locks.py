"""The lock files hold what ``pyproject.toml`` requires, in one version for an environment."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.installing import installer
from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = PYPROJECT["project"]["dependencies"]
REQUIRED: Mapping[str, list[str]] = {
    "cpu": PRODUCT + PYPROJECT["project"]["optional-dependencies"]["cpu"],
    "test": PRODUCT + PYPROJECT["dependency-groups"]["test"],
    "site": PYPROJECT["dependency-groups"]["site"],
    "clients": PYPROJECT["dependency-groups"]["clients"],
}


def locked(name: str) -> dict[str, str]:
    pins = (line.split("==") for line in (ROOT / ".locks" / f"{name}.txt").read_text().splitlines())
    return {canonicalize_name(package): version for package, version in pins}


@pytest.mark.parametrize("name", REQUIRED)
def test_lock_has_a_version_of_each_requirement(name: str) -> None:
    versions = locked(name)
    assert [
        each
        for each in map(Requirement, REQUIRED[name])
        if not each.specifier.contains(versions.get(canonicalize_name(each.name), "0"))
    ] == []


def test_tests_run_the_uv_that_installs() -> None:
    name, _, version = installer().UV.partition("==")
    assert locked("test")[name] == version


def test_locks_of_one_environment_agree() -> None:
    everything = [locked(name).items() for name in ("cpu", "test", "site")]
    assert len({pin for pins in everything for pin in pins}) == len({name for pins in everything for name, _ in pins})
