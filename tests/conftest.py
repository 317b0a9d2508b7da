from __future__ import annotations

import pytest

from stages.harmony import HarmonyEncoding, load_encoding

pytest_plugins = ["tests.support.stores"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the derived files of every fixture")


@pytest.fixture(scope="session")
def encoding() -> HarmonyEncoding:
    return load_encoding()
