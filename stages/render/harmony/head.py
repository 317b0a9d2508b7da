"""The head of a prompt: the model's identity, its instructions and its tools.

System and developer messages are exactly those of openai_harmony.  Built-in tools are declared in the system message,
as in gpt-oss's training, and all others in the developer message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import Item, Message
from penstock.pipeline.protocol.response import Effort
from penstock.pipeline.protocol.tools import HostedTool, Tool, Toolset
from penstock.stages.models.harmony.hosted import hosted_section
from penstock.stages.models.harmony.typescript import NamedTool, by_namespace, comment, tools_section
from penstock.stages.render.harmony.message import HarmonyMessage

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS_CHANNEL = "Calls to these tools must go to the commentary channel:"
_EFFORTS: Mapping[Effort | None, str] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    None: "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""gpt-oss has three reasoning efforts, and cannot skip reasoning."""

_KEPT_SECTIONS = 32
_KEPT_LENGTH = 200_000
"""Characters of the largest tools whose section is cached.  The cache takes 30 MB at most."""


def head(request: ResolvedRequest, leading: Sequence[Item]) -> Iterator[HarmonyMessage]:
    """Yield the system message and, if it has any content, the developer message.

    ``leading`` are the items at the start of the conversation that only add instructions or tools.
    """
    shown = _shown(request.facts.tools)
    hosted = [tool for tool in shown if isinstance(tool, HostedTool)]
    tools = [tool for tool in shown if not isinstance(tool, HostedTool)]
    yield HarmonyMessage("system", (_system_text(request, hosted, tools),))
    added = [item.text for item in leading if isinstance(item, Message)]
    instructions = "\n\n".join(filter(None, [request.facts.response.instructions, *added]))
    text_format: dict[str, Any] = request.facts.response.text.get("format") or {}
    sections = [
        f"# Instructions\n\n{instructions}" if instructions else "",
        _tools_section(tools, request.facts.tools.descriptions) if tools else "",
        formats_section(text_format),
    ]
    if filled := [section for section in sections if section]:
        # "#" after a line break always begins a token
        texts = (*(f"{section}\n\n" for section in filled[:-1]), filled[-1])
        yield HarmonyMessage("developer", texts)


@dataclass(frozen=True)
class _Declaration:
    """Tools to declare, as a cache key.

    Declarations are equal if their ``picture``, the tools as a string, is equal: schemas cannot be hashed.
    """

    picture: str
    tools: Sequence[NamedTool] = field(compare=False)
    descriptions: Mapping[str, str] = field(compare=False)


def _tools_section(tools: Sequence[NamedTool], descriptions: Mapping[str, str]) -> str:
    """Return the section that declares ``tools``.  It is cached: an agent declares the same tools in every turn."""
    declaration = _Declaration(f"{tools}{descriptions}", tools, descriptions)
    return _kept_section(declaration) if len(declaration.picture) <= _KEPT_LENGTH else _section(declaration)


def _section(declaration: _Declaration) -> str:
    return tools_section(declaration.tools, declaration.descriptions)


_kept_section = lru_cache(_KEPT_SECTIONS)(_section)


def _shown(tools: Toolset) -> tuple[Tool, ...]:
    """Return all tools, callable or not, so that the prefix cache still matches; none if calls are forbidden."""
    return () if tools.choice == "none" else tools.tools


def _system_text(request: ResolvedRequest, hosted: Sequence[HostedTool], tools: Sequence[NamedTool]) -> str:
    effort = _EFFORTS[request.facts.response.reasoning.effort]
    named = ", ".join(f"'{namespace}'" for namespace in by_namespace(tools))
    channels = f"{_CHANNELS}\n{_CALLS_CHANNEL} {named}." if tools else _CHANNELS
    about = f"{_IDENTITY}\nCurrent date: {request.facts.date}"
    return "\n\n".join([about, f"Reasoning: {effort}", *([hosted_section(hosted)] if hosted else ()), channels])


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def formats_section(text_format: Mapping[str, Any]) -> str:
    """The part of the developer message that declares ``text_format``; empty if the format has no schema."""
    if text_format.get("type") != "json_schema":
        return ""
    described = text_format.get("description")
    lines = [*(comment(described) if described else ()), _json(text_format.get("schema", {}))]
    return "\n".join(["# Response Formats", "", f"## {text_format.get('name', 'answer')}", "", *lines])
