"""Plug-in for vLLM's tests: those that start a server speak to one that runs already, and the others are left out.

``REMOTE_SERVERS`` has the URLs of the servers by their models; ``MODEL --reasoning-parser`` is one that thinks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from vllm.transformers_utils import repo_utils

utils: Any = import_module("tests.utils")
"""The helpers of vLLM's tests."""

SERVERS: dict[str, str] = json.loads(os.environ["REMOTE_SERVERS"])
THINKS = "--reasoning-parser"
REMOTE = "RemoteOpenAIServer"
"""The name of the class that starts a server in vLLM's tests."""


class RunningServer(getattr(utils, REMOTE)):  # type: ignore[misc]
    """A server that is started and stopped elsewhere."""

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        thinking = f"{model} {THINKS}" if THINKS in vllm_serve_args else model
        url = SERVERS.get(thinking) or SERVERS.get(model)
        if url is None:
            pytest.skip(f"needs {model}")
        parts = urlsplit(url)
        self.uds, self.host, self.port = None, parts.hostname, parts.port

    def __exit__(self, *_: object) -> None:
        pass


setattr(utils, REMOTE, RunningServer)  # before a conftest imports it


def pytest_configure() -> None:
    """Replace the downloads of adapters."""
    repo_utils.hf_api = lambda: SimpleNamespace(snapshot_download=lambda *_, **__: "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that speak to a server."""
    kept = [item for item in items if _speaks(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _speaks(item: Any) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # noqa: SLF001 - pytest has no public name for them
    functions = [item.function, *(fixture.func for named in fixtures for fixture in named)]
    return any(REMOTE in function.__code__.co_names for function in functions)
