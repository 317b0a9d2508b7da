"""The browser as a kind of tool: what the stages know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from msgspec import UNSET
from openai_harmony import ToolNamespaceConfig

from penstock.extensions.tools.browser.calls import Call, Find, Open, Search, parse_call
from penstock.pipeline.errors import UnsupportedParameter
from penstock.pipeline.frames import BrowserAction, CallData, WebCallOpened
from penstock.pipeline.hosted_kinds import ByMcp, HostedKind, ToolOptions, refuse_bound
from penstock.pipeline.protocol.items import WebSearchCall
from penstock.pipeline.protocol.params.request import SOURCES, WEB_RESULTS
from penstock.pipeline.protocol.params.tools import ToolParam, WebFilters, WebSearchToolParam
from penstock.pipeline.protocol.tools import FunctionTool
from penstock.stages.models.shell_calls import ArgumentsInvalid


class WebSearchOptions(ToolOptions, frozen=True, omit_defaults=True):
    """The options of a web search."""

    domains: tuple[str, ...] = ()
    """The only hosts, with their subdomains, whose pages may be found and opened; empty if all may."""
    context_size: Literal["low", "medium", "high"] = "medium"
    """The size of the part of a page that the model reads at once."""
    blocked: tuple[str, ...] = ()
    """The hosts, with their subdomains, whose pages are neither found nor opened."""
    location: str = ""
    """The place of the user, in words for the model."""


def _read(tool: ToolParam, path: str, *, by_mcp: bool) -> WebSearchOptions:
    """Return the options; those of an MCP server are the defaults."""
    if not isinstance(tool, WebSearchToolParam):
        return WebSearchOptions(path=path)
    if tool.external_web_access is False:  # OpenAI would search its page cache; this server has only the live web
        message = "This server has no cache of the web to search."
        raise UnsupportedParameter(message, param=f"{path}.external_web_access")
    filters = tool.filters or WebFilters()
    if by_mcp and (filters.allowed_domains or filters.blocked_domains):
        refuse_bound("browser", path, "filters")
    return WebSearchOptions(
        tuple(filters.allowed_domains or ()),
        tool.search_context_size or "medium",
        tuple(filters.blocked_domains or ()),
        tool.user_location.in_words if tool.user_location else "",
        path=path,
    )


def _instructions(options: Mapping[str, Any]) -> str:
    place = options.get("location")
    return f"The user is here: {place}. Search for what fits the place, if it matters." if place else ""


_UNCLEAR: Mapping[str, Call] = {"search": Search(""), "open": Open(), "find": Find("")}
"""The functions, as called with unreadable arguments."""


def _called(name: str, text: str, suffix: str) -> WebSearchCall:
    return WebSearchCall(WebSearchCall.new_id(suffix), "incomplete", _action(name, text))


def _action(name: str, text: str) -> dict[str, Any]:
    """Return the action of a call, as far as its arguments reveal it."""
    try:
        call = parse_call(name, text)
    except ArgumentsInvalid:
        call = _UNCLEAR[name]
    match call:
        case Search(query):
            return {"type": "search", "query": query, "queries": [query]}
        case Open(target):
            return {"type": "open_page", "url": target if isinstance(target, str) else None}
        case Find(pattern):
            return {"type": "find_in_page", "url": "", "pattern": pattern}


def _shown(data: CallData, include: Collection[str]) -> CallData | None:
    """Return the action with the sources and the results only if the request includes them."""
    match data:
        case BrowserAction(action, results):
            if SOURCES not in include:
                action = {key: value for key, value in action.items() if key != "sources"}
            return BrowserAction(action, results if WEB_RESULTS in include else UNSET)
        case _:
            return data


def _action_by_mcp(name: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the action of a call.  A link given by number has no URL here: only the MCP server knows it."""
    match name:
        case "search":
            return {"type": "search", "query": str(arguments.get("query", ""))}
        case "find":
            return {"type": "find_in_page", "pattern": str(arguments.get("pattern", "")), "url": ""}
        case "open":
            page = arguments.get("id")
            return {"type": "open_page", "url": page if isinstance(page, str) else None}
        case _:
            return None


_TRAINED = ToolNamespaceConfig.browser()

BROWSER = HostedKind(
    namespace="browser",
    api_type="web_search",
    description=_TRAINED.description or "",
    functions=tuple(FunctionTool(tool.name, tool.description, tool.parameters) for tool in _TRAINED.tools),
    opened=WebCallOpened,
    called=_called,
    labels=("browser", "web_search", "web_search_preview"),
    label_of_vllm="web_search_preview",
    read=_read,
    instructions=_instructions,
    option="--web-search",
    is_unasked=True,
    shown=_shown,
    cites=True,
    by_mcp=ByMcp(action=_action_by_mcp),
)
