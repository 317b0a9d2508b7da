"""Hosts of the operator's own: each brings functions, which requests ask for as for those of an MCP server.

``{"type": "mcp", "server_label": "weather"}`` in a request offers the functions of the host of that label.  All that
holds for MCP servers holds for it: choices, allowed tools, approvals, and the items that the client sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from inspect import isawaitable

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.members import missing_members
from penstock.pipeline.plugins import HOSTS, KINDS, TOOL, WrongPlugin, blamed, function_named, installed, made_by
from penstock.services.tools import Host, HostSettings, OwnHost, Session, ToolResult, callable_tools


def label_of(name: str) -> str:
    """Return the label of a host that the operator names: that of its function, or of its entry point."""
    return name.rpartition(":")[2].rpartition(".")[2]


async def own_host(name: str, settings: HostSettings) -> OwnHost:
    """Return the host that the option `TOOL` names; raises `WrongPlugin` if there is none that keeps to its protocol.

    The name is ``module:function``, ``file.py:function`` or an entry point of the group ``penstock.hosts``.
    """
    made = made_by(function_named(name, TOOL, HOSTS), name, TOOL, settings, wanted="one argument: the HostSettings")
    with blamed(name, TOOL):
        host = await made if isawaitable(made) else made
    if problems := [*missing_members(host, Host), *missing_members(host, OwnHost)] or list(_wrong_functions(host)):
        if name in installed(HOSTS):
            problems.append(f"or, for a kind of tool, give {KINDS} an entry point of that name")
        raise WrongPlugin(name, "; ".join(problems), TOOL)
    return host  # type: ignore[no-any-return]


def _wrong_functions(host: OwnHost) -> Iterable[str]:
    """Yield what keeps the model from calling a function of a host."""
    known = {id(function) for function in callable_tools(host.functions)}
    for function in host.functions:
        if id(function) not in known:
            yield f"the function {function.name!r} needs a name of its own, of letters, digits, _, . and -"
        elif function.input_schema.get("type") != "object":
            yield f"the input_schema of the function {function.name!r} is not that of an object"


class OwnSession:
    """One response's use of a host of the operator's own, opened at the first call.  What it returns is checked."""

    def __init__(self, host: OwnHost, request: ResolvedRequest) -> None:
        self._host = host
        self._request = request
        self._session: Session | None = None

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        if self._session is None:
            self._session = self._host.session(self._request)
        result: object = await self._session.run(name, text, seconds)
        match result:
            case ToolResult(str(), None | str()):
                return replace(result, data=None)
            case _:
                raise TypeError(f"The call of {name} returned {result!r} instead of a ToolResult of texts.")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
