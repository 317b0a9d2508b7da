"""Installing with uv: it gets the settings of pip."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.installing import installer

AS_PIP_CHOOSES = ("--index-strategy", "unsafe-best-match")


@pytest.fixture(scope="module")
def install() -> ModuleType:
    return installer()


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, []),
        ({"index-url": "https://a/simple", "timeout": "180"}, ["--default-index", "https://a/simple"]),
        (
            {"extra-index-url": "https://a\nhttps://b", "find-links": "/wheels"},
            ["--index", "https://a", "--index", "https://b", "--find-links", "/wheels", *AS_PIP_CHOOSES],
        ),
        (
            {"no-index": "false", "trusted-host": "a", "constraint": "c.txt"},
            ["--constraint", "c.txt", "--allow-insecure-host", "a"],
        ),
        ({"no-index": "1"}, ["--no-index"]),
    ],
)
def test_uv_installs_from_where_pip_is_configured_to(
    install: ModuleType, settings: dict[str, str], options: list[str]
) -> None:
    assert list(install.options_of_uv(settings)) == options


@pytest.mark.io
def test_settings_of_the_environment_come_before_those_of_files(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a https://b")
    assert install.settings_of_pip()["extra-index-url"].split() == ["https://a", "https://b"]
