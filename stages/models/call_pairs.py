"""Tool calls as conversation items: helpers that all models share."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline.protocol.items import Call, CallOutput, Item


def callers_of(items: Sequence[Item]) -> dict[int, int]:
    """Map the position of each call output to the position of its call.

    That is the latest earlier call with the same ``call_id``: some clients reuse their ids in every turn.  Outputs
    without a call are left out.
    """
    latest: dict[str, int] = {}
    callers: dict[int, int] = {}
    for at, item in enumerate(items):
        if isinstance(item, Call):
            latest[item.call_id] = at
        elif isinstance(item, CallOutput) and item.call_id in latest:
            callers[at] = latest[item.call_id]
    return callers
