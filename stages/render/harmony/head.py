"""The head of a prompt: the model's identity, its instructions and its tools.

System and developer messages are exactly those of openai_harmony.  Built-in tools are declared in the system message,
as in gpt-oss's training, and all others in the developer message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from threading import Lock
from typing import Any

from cachetools import LRUCache, cached

from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.response import Effort
from penstock.pipeline.protocol.tools import HostedTool, tool_key
from penstock.stages.models.harmony.hosted import hosted_section
from penstock.stages.models.harmony.typescript import NamedTool, by_namespace, comment, tools_section
from penstock.stages.render.harmony.message import HarmonyMessage
from penstock.stages.render.item_texts import placed

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "Knowledge cutoff: 2024-06"
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

_KEPT_CHARACTERS = 6_400_000
"""Limit on the sections of tools in the cache: an agent declares the same tools in every turn."""


def head(request: ResolvedRequest, instructions: str, *, in_system: bool) -> Iterator[HarmonyMessage]:
    """Yield the system message and, if it has any content, the developer message; one of them has ``instructions``."""
    spoken, instructions = (instructions, "") if in_system else ("", instructions)
    # all tools are declared, callable or not, so that the prefix cache still matches
    elsewhere = placed(request)
    offered = () if request.facts.tools.choice == "none" else request.facts.tools.tools
    shown = [tool for tool in offered if tool_key(tool) not in elsewhere] if elsewhere else offered
    hosted = [tool for tool in shown if isinstance(tool, HostedTool)]
    tools = [tool for tool in shown if not isinstance(tool, HostedTool)]
    yield HarmonyMessage("system", (_system_text(request, spoken, hosted, tools),))
    sections = [
        f"# Instructions\n\n{instructions}" if instructions else "",
        declared_tools(tools, request.facts.tools.descriptions) if tools else "",
        formats_section(request.facts.text_format),
    ]
    if filled := [section for section in sections if section]:
        # "#" after a line break always begins a token
        texts = (*(f"{section}\n\n" for section in filled[:-1]), filled[-1])
        yield HarmonyMessage("developer", texts)


def _key(tools: Sequence[NamedTool], descriptions: Mapping[str, str]) -> bytes:
    return sha256(f"{tools}{descriptions}".encode("utf-8", "surrogatepass")).digest()  # schemas cannot be hashed


_sections: LRUCache[bytes, str] = LRUCache(_KEPT_CHARACTERS, len)
declared_tools = cached(_sections, _key, Lock())(tools_section)


def _system_text(
    request: ResolvedRequest, instructions: str, hosted: Sequence[HostedTool], tools: Sequence[NamedTool]
) -> str:
    effort = _EFFORTS[request.facts.effort]
    named = ", ".join(f"'{namespace}'" for namespace in by_namespace(tools))
    channels = f"{_CHANNELS}\n{_CALLS_CHANNEL} {named}." if tools else _CHANNELS
    date = f"Current date: {request.facts.date}"
    about = "\n".join([_IDENTITY, *([instructions] if instructions else ()), _CUTOFF, date])
    sections = [hosted_section(hosted, request.facts.tools.descriptions)] if hosted else []
    return "\n\n".join([about, f"Reasoning: {effort}", *sections, channels])


_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def formats_section(text_format: Mapping[str, Any]) -> str:
    """The part of the developer message that declares ``text_format``; empty if the format has no schema."""
    if text_format.get("type") != "json_schema":
        return ""
    described = text_format.get("description")
    lines = [*(comment(described) if described else ()), _json(text_format.get("schema", {}))]
    return "\n".join(["# Response Formats", "", f"## {text_format.get('name', 'answer')}", "", *lines])
