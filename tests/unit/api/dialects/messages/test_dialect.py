"""The dialect of the Messages API keeps the rules of dialects."""

from __future__ import annotations

import json

from penstock.api.dialects.messages.dialect import MESSAGES
from penstock.testing import check_dialect
from tests.support.messages import heard
from tests.support.paths import CHAT, HARMONY

RECORDINGS = [HARMONY / "greeting", HARMONY / "function_call", *sorted(CHAT.glob("*/"))[:3]]


async def test_it_keeps_all_rules() -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    omitted = {"type": "adaptive", "display": "omitted"}
    bodies = [body, {**body, "stream": True, "thinking": omitted}, {**body, "thinking": {"type": "disabled"}}]
    await check_dialect(MESSAGES, [json.dumps(body).encode() for body in bodies], heard, RECORDINGS)
