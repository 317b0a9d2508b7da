"""Pages of recordings in a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from playwright.sync_api import Page

from pipeline.core import Pipeline
from pipeline.page.flow import Flow, flow_of
from tests.support.paths import ROOT

UNPACKED = ROOT / "tests/live/page/node/node_modules/.browser"
"""The browser that npm brought, with the libraries and fonts of its own."""


Result = TypeVar("Result")
ShowPage: TypeAlias = Callable[..., Page]


def unedited(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline


def run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a thread of its own: Playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def flow_at(folder: Path) -> Flow:
    return run_in_thread(flow_of(folder, unedited))
