"""One response over HTTP, as JSON on the standard output: to be run where the heavy libraries are missing.

python -m tests.support.light_response
"""

from __future__ import annotations

import asyncio
import json
import sys

from pipeline.protocol.events import TerminalEvent
from pipeline.protocol.items import Message
from pipeline.protocol.reading import read_request
from pipeline.record import replay
from stages.harmony import load_encoding
from stages.persist.database import Nowhere
from stages.persist.live import LiveResponses
from stages.persist.store import Store
from stages.responses import harmony_responses
from tests.support.fake_vllm import FakeVllm
from tests.support.http_engine import engine_over

ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"


async def main() -> None:
    """Ask the fake server through the whole pipeline."""
    encoding = load_encoding()
    async with engine_over(FakeVllm(encoding.encode_markup(ANSWER))) as engine:
        pipeline = harmony_responses(engine.models, engine, encoding, LiveResponses(Store(Nowhere())))
        request = await read_request(json.dumps({"model": "tiny", "input": "Hi"}).encode())
        async with pipeline.open(replay([request])) as events:
            *_, last = [event async for event in events]
    assert isinstance(last, TerminalEvent)
    message = last.response.output[-1]
    assert isinstance(message, Message)
    sys.stdout.write(json.dumps(message.text))


if __name__ == "__main__":
    asyncio.run(main())
