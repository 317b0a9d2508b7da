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
ends after its `seconds`. `await check_host(warehouse(HostSettings()), ...)` of `penstock.testing` checks all that.
"""

from __future__ import annotations

import msgspec

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import ListedTool
from penstock.stages.services.tools import HostSettings, ToolResult

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
