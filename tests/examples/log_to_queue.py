"""Write one line of JSON for each response to a file, through a queue that a thread empties.

    AUDIT_FILE=responses.jsonl penstock serve --with log_to_queue.py:install

The stage only puts the line into the queue, so that a slow disk delays no response. All responses leave a line, also
those that fail or are cancelled: the `finally` runs however the response ends. There, nothing may be awaited.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from queue import Queue
from typing import Any

from penstock.pipeline.core import Pipeline
from penstock.pipeline.protocol.events import ResponseCreated, ResponseEvent, TerminalEvent


@cache  # one queue and one thread, begun with the first response
def audit() -> logging.Logger:
    waiting: Queue[logging.LogRecord] = Queue(maxsize=10_000)
    file = RotatingFileHandler(os.environ.get("AUDIT_FILE", "responses.jsonl"), maxBytes=2**30, backupCount=3)
    listener = QueueListener(waiting, file)
    listener.start()
    atexit.register(listener.stop)  # writes the lines that still wait
    logger = logging.getLogger("audit")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(QueueHandler(waiting))
    return logger


async def log(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    line: dict[str, Any] = {}
    try:
        async for event in source:
            if isinstance(event, ResponseCreated):
                line = {"id": event.response.id, "model": event.response.model, "status": "cut"}
            elif isinstance(event, TerminalEvent):
                usage = event.response.usage
                line |= {"status": event.response.status, "tokens": usage.total_tokens if usage else None}
            yield event
    finally:
        if line:  # a request that is refused has no response
            audit().info(json.dumps(line))


def install(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    return pipeline.insert_after("persist", "log_to_queue", log)
