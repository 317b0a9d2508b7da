"""Give the model a tool that runs in the server: a host with its functions, and a session for each response.

```sh
penstock serve openai/gpt-oss-20b --tool a_tool_of_your_own.py:warehouse
```

The name of the function is the label by which a request asks for the tool. The model calls its functions between two
turns, and the client sees the items of MCP:

```json
{"model": "openai/gpt-oss-20b", "input": "How many lamps are left?",
 "tools": [{"type": "mcp", "server_label": "warehouse", "require_approval": "never"}]}
```

A session may keep state for its response: it gets the request, and is closed at the end. `text` is what the model
wrote, valid or not. An error in the result is for the model, which goes on from it. A call that takes long awaits, and
ends after its `seconds`. `check_host` of `penstock.testing` checks all that, in an async function:

```python
from penstock.testing import ExampleCalls, check_host

calls = ExampleCalls(quick=("pieces_left", '{"article": "lamp"}'), wrong=("pieces_left", '{"article": "bed"}'))
await check_host(warehouse(HostSettings()), calls)  # a host whose calls can take a minute gives one as slow=, too
```

To try it without a model, let a backend make the call, unless its result is the last item. Send the request above, with
the model `caller`, to `penstock serve --engine caller.py:engine --tool a_tool_of_your_own.py:warehouse`:

```python
# caller.py
from collections.abc import AsyncGenerator, AsyncIterator

from penstock.api.settings import Settings
from penstock.pipeline import frames
from penstock.pipeline.protocol.items import McpCall


class Caller:
    models, context_length, is_alive = ("caller",), 8192, True

    async def answer(self, source: AsyncIterator[frames.ResolvedRequest]) -> AsyncGenerator[frames.ParsedFrame, None]:
        async for request in source:
            last = request.items[-1]
            said = f"It said: {last.output or last.error}" if isinstance(last, McpCall) else None
            yield frames.GenerationStarted(request.facts, prompt_tokens=0)
            yield frames.MessageOpened() if said else frames.McpCallOpened("warehouse", "pieces_left")
            yield frames.ItemDelta(said or '{"article": "lamp"}')
            yield frames.ItemClosed(complete=True)
            yield frames.TurnFinished("stop", cached_tokens=0, output_tokens=1, reasoning_tokens=0, duration=0.1)

    async def cancel(self, response_id: str) -> bool:
        return False

    async def stop(self) -> None: ...

    async def close(self) -> None: ...


def engine(settings: Settings) -> Caller:
    return Caller()
```

The tool itself:
"""

from __future__ import annotations

import msgspec

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import ListedTool
from penstock.services.tools import HostSettings, ToolResult

PIECES = {"lamp": 12, "chair": 3}


class Asked(msgspec.Struct):
    article: str


class Warehouse:
    functions = (
        ListedTool(
            "pieces_left",
            {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]},
            "Return the number of pieces that the warehouse has of an article, such as lamp.",
        ),
    )

    def session(self, request: ResolvedRequest) -> Visit:
        return Visit()

    async def close(self) -> None:
        pass


class Visit:
    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            article = msgspec.json.decode(text, type=Asked).article
        except msgspec.DecodeError as error:
            return ToolResult(error=str(error))
        if article not in PIECES:
            return ToolResult(error=f"the articles are {', '.join(PIECES)}")
        return ToolResult(str(PIECES[article]))

    async def close(self) -> None:
        pass


def warehouse(settings: HostSettings) -> Warehouse:
    return Warehouse()
