"""A kind of tool in one folder: scales, which a request asks for by a type of their own.

``{"type": "scales", "unit": "g"}`` in a request offers a function, `weigh`.  ``--tool scales`` gives it to the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import McpCallOpened, ResolvedRequest
from penstock.pipeline.hosted_kinds import HostedKind, ToolOptions, options_of
from penstock.pipeline.protocol.items import McpCall
from penstock.pipeline.protocol.params.tools import OtherToolParam, ToolParam
from penstock.pipeline.protocol.tools import FunctionTool
from penstock.services.tools import HostSettings, Source, ToolResult

GRAMS = {"apple": 182, "melon": 1_400}
CURSOR = 50
"""The number of the source in results and marks: the browser counts from 0, and file search from 1,000."""


class ScalesOptions(ToolOptions, frozen=True, omit_defaults=True):
    """The options of the scales."""

    unit: Literal["g", "kg"] = "g"


def read(tool: ToolParam, path: str, *, by_mcp: bool) -> ScalesOptions:
    """Return the options of a tool of the type ``scales``."""
    sent = tool.sent if isinstance(tool, OtherToolParam) else {}
    for key in sent.keys() - {"type", "unit"}:
        raise InvalidRequest("Scales have no such option.", param=f"{path}.{key}")
    match sent.get("unit") or "g":
        case "g" | "kg" as known:
            return ScalesOptions(known, path=path)
        case _:
            raise InvalidRequest("The unit of scales is g or kg.", param=f"{path}.unit")


def instructions(options: Mapping[str, Any]) -> str:
    return "Give weights in kilograms." if options.get("unit") == "kg" else ""


def called(name: str, text: str, suffix: str) -> McpCall:
    return McpCall(McpCall.new_id(suffix), server_label="scales", name=name, arguments=text, status="incomplete")


THING = {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]}

SCALES = HostedKind(
    namespace="scales",
    api_type="scales",
    description="Scales for fruit. Cite a weight as 【50†L0】.",
    functions=(FunctionTool("weigh", "Weighs a fruit.", THING),),
    opened=lambda name: McpCallOpened("scales", name),
    called=called,
    labels=("scales",),
    read=read,
    instructions=instructions,
    cites=True,
)


class Weighed(msgspec.Struct):
    """The arguments of a call."""

    thing: str


class Scales:
    """The host, and the session of every response: nothing differs between two of them but the unit."""

    def __init__(self, unit: str = "g") -> None:
        self._unit = unit

    def session(self, request: ResolvedRequest) -> Scales:
        return Scales(options_of(request.facts, "scales", ScalesOptions).unit)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            grams = GRAMS[msgspec.json.decode(text, type=Weighed).thing]
        except (KeyError, msgspec.DecodeError):
            return ToolResult(error="There is no such fruit.")
        weight = grams if self._unit == "g" else grams / 1_000
        return ToolResult(f"[{CURSOR}] {weight} {self._unit}")

    def source(self, cursor: int) -> Source | None:
        return Source("Scales", "https://scales.example/1") if cursor == CURSOR else None

    async def close(self) -> None:
        pass


def host(settings: HostSettings) -> Scales:
    return Scales()
