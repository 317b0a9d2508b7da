"""Each check passes on penstock, and on no server that breaks its rule."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from inspect import getsource
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from penstock.api.http.auth import Keys
from penstock.extensions.workbench.conformance.check import Speech, Verdict
from penstock.extensions.workbench.conformance.checks import ALL, MODULES
from penstock.extensions.workbench.conformance.client import Server
from penstock.extensions.workbench.conformance.run import outcome
from tests.support.api_clients import PATIENCE
from tests.support.conforming_engine import ConformingEngine
from tests.support.faulty_server import Fault, Watched, spoiled
from tests.support.server import running_server
from tests.unit.extensions.workbench.conformance import (
    chat_faults,
    decisions_faults,
    messages_faults,
    responses_faults,
    shared_faults,
)

pytestmark = [pytest.mark.io]

CHECKS = {check.name: check for check in ALL}
FAULTS: dict[str, list[Fault]] = {
    **shared_faults.FAULTS,
    **responses_faults.FAULTS,
    **chat_faults.FAULTS,
    **messages_faults.FAULTS,
    **decisions_faults.FAULTS,
}
CLEAN: dict[str, Verdict] = {"responses.parallel_calls": "warn", "chat.parallel_calls": "warn"}
"""The verdicts on penstock other than pass: gpt-oss makes one call at a time."""
ADVICE = {
    *(
        "responses.nullable",
        "messages.nullable",
        "chat.no_usage",
        "messages.request_id",
        "messages.count_tokens",
        "messages.thinking",
    ),
    *(f"{speech}.sdk_answer" for speech in get_args(Speech)),  # its types change with its releases
    *("chat.call_pieces", "messages.needs_max_tokens", "chat.bad_role", "messages.bad_role"),
}
"""Checks whose faults may be no more than warnings."""
LARGEST = 10_000_000
SHOWN = 200
"""Characters by which a request is known in a report, which cuts long ones."""
KEY = "sk-0123456789abcdef"


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    keys = Keys(given=[KEY])
    async with running_server(ConformingEngine(), tmp_path, max_body_bytes=LARGEST, keys=keys) as server:
        yield server.url


def test_each_check_has_faults() -> None:
    assert set(FAULTS) == set(CHECKS)
    assert all(FAULTS.values())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_check_asserts_what_a_server_sends(module: ModuleType) -> None:
    """An assertion that fails would end the command; a violation fails its check."""
    asserted = [node.lineno for node in ast.walk(ast.parse(getsource(module))) if isinstance(node, ast.Assert)]
    assert asserted == []


@pytest.mark.slow
@pytest.mark.parametrize("speech", get_args(Speech))
async def test_penstock_passes(url: str, speech: str) -> None:
    async with Server.opened(f"{url}/v1", "tiny", key=KEY) as server:
        found = [await outcome(server, check) for check in ALL if check.speech == speech]
    other = {each.check.name: (each.verdict, each.reason) for each in found if each.verdict != "pass"}
    assert {name: verdict for name, (verdict, _) in other.items()} == {
        name: verdict for name, verdict in CLEAN.items() if name.startswith(speech)
    }, other


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
async def test_no_check_passes_on_a_server_that_breaks_its_rule(url: str, name: str) -> None:
    """Each fault is found, and the report shows an answer that it changed."""
    allowed = ("fail", "warn") if name in ADVICE else ("fail",)
    missed = []
    for at, fault in enumerate(map(Watched, FAULTS[name])):
        async with (
            spoiled(url, fault) as broken,
            Server.opened(f"{broken}/v1", "tiny", key=KEY, timeout=PATIENCE) as server,
        ):
            found = await outcome(server, CHECKS[name])
        changed = [request.replace("/v1", "", 1)[:SHOWN] for request in fault.requests]
        is_shown = not found.sent or found.sent.startswith(tuple(changed))
        if found.verdict not in allowed or not changed or not is_shown:
            missed.append((at, found.verdict, found.reason, found.sent, changed))
    assert not missed
