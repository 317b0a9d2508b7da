"""Give the model a tool that the server runs: a function in an MCP server, which is a process of its own.

This is no stage: `--mcp-config tools.json` starts it, with the Python that penstock is installed in, or any other that
has the package `mcp` from version 2 on. `tools.json` is

```json
{"mcpServers": {"warehouse": {"command": "venv/bin/python", "args": ["a_tool_through_mcp.py"]}}}
```

A request asks for the tools by the label, as for [a tool of your own](#a-tool-of-your-own). The model reads the
docstring and the annotations, and the message of a `ToolError`, from which it can go on. The first request starts the
process, and all later ones share it. `penstock check --mcp-config tools.json` lists its tools.
"""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PIECES = {"lamp": 12, "chair": 3}
server = MCPServer("warehouse")


@server.tool()
def pieces_left(article: str) -> int:
    """Return the number of pieces that the warehouse has of an article, such as "lamp"."""
    if article not in PIECES:
        raise ToolError(f"the articles are {', '.join(PIECES)}")
    return PIECES[article]


if __name__ == "__main__":
    server.run()
