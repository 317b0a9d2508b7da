"""Responses that have waited are completed when they end, whatever they waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.api_clients import wait_until
from tests.support.several import SeveralServer, says, several_models


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_response_that_waited_is_completed_when_it_ends(tmp_path: Path, restarts: bool) -> None:
    big = says("I am big.")
    big.hold()
    async with several_models(tmp_path, {"big": big}, max_background=1) as served:
        held = await served.start_background({"model": "big"})
        await wait_until(lambda: big.running)
        queued = await served.start_background({"model": "big"})
        if not restarts:
            await check_ends(served, [held, queued])
            return
    async with several_models(tmp_path, {"big": says("I am big.")}, max_background=1) as later:
        later.engines["big"].hold()
        await check_ends(later, [queued])


async def check_ends(served: SeveralServer, waiting: Sequence[str]) -> None:
    """Let time pass, and then the responses go on; their ends are not before that."""
    created = [(await served.get_response(response_id))["created_at"] for response_id in waiting]
    await wait_until(lambda: time.time() > max(created) + 2)
    went_on = int(time.time())
    served.engines["big"].say_all()
    for response_id in waiting:
        ended = await served.wait_for_end(response_id)
        assert ended["status"] == "completed"
        assert went_on <= ended["completed_at"] <= time.time()
