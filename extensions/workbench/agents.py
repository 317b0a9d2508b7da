"""The coding agents that ``penstock launch`` starts, and the settings with which each uses a server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.api.settings.sources import CLIENT_KEY

NO_KEY = "none"
"""The key for a server without keys: the clients refuse an empty one."""

MOST_OUTPUT = 32_000
"""Tokens of an answer, at most; an eighth of a shorter context, as agents compact before that part is used."""

ADVISED = 32_768
"""Tokens of the least context in which an agent works for more than a few calls before it compacts."""

INSTRUCTIONS = "You are a coding agent. Work in the current folder, and edit files with apply_patch."
"""The prompt for Codex, which has none for models that it does not know."""


@dataclass(frozen=True)
class Served:
    """A model on a server: the ``url`` ends before ``/v1``, and ``window`` is its context in tokens, if it has one."""

    url: str
    model: str
    window: int | None
    key: str = ""
    sees_images: bool = False
    searches: bool = False
    """True if the server runs web searches."""
    small: str = ""
    """The model for small tasks, such as titles; empty for the same one."""
    others: tuple[Served, ...] = ()
    """The other models of the server, for an agent in which the user may choose one."""

    @property
    def output(self) -> int:
        """The tokens of an answer."""
        return MOST_OUTPUT if self.window is None else min(MOST_OUTPUT, self.window // 8)

    def holds(self, prompt: int) -> bool:
        """Return True if the context holds a prompt of that many tokens, and an answer."""
        return self.window is None or prompt + self.output <= self.window


@dataclass(frozen=True)
class Start:
    """The start of an agent: its variables, those of others that must not be set, its arguments, and files for it."""

    environment: Mapping[str, str]
    removed: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """A coding agent: its program, its package of npm, and how it is started on a served model."""

    program: str
    package: str
    version: str
    """The release whose prompt was counted."""
    prompt: int
    """Tokens of its own prompt and tools, at most; `tests/live` counts them."""
    start: Callable[[Served], Start]

    def shortage(self, served: Served) -> str:
        """Return what is wrong with a context, and what to set; empty if sessions fit into it."""
        if served.window is None or served.window >= ADVISED:
            return ""
        problem = "it compacts after a few calls" if served.holds(self.prompt) else "no answer fits beside them"
        return (
            f"{self.program} {self.version} takes {self.prompt:,} tokens for its own prompt and tools, and the context "
            f"of {served.model!r} has {served.window:,}: {problem}. Start the server with --max-model-len {ADVISED} or "
            "more, or with a model of a longer context"
        )


def claude(served: Served) -> Start:
    """Start Claude Code: every model that it asks for is the served one, or the small one for small tasks.

    It has no web search if the server runs none.
    """
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "FABLE")))
    small = ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    clouds = ("BEDROCK", "VERTEX", "FOUNDRY")
    return Start(
        {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,
            **dict.fromkeys(models, served.model),
            **dict.fromkeys(small, served.small or served.model),
            **({} if served.window is None else {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.window)}),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        removed=("ANTHROPIC_API_KEY", *(f"CLAUDE_CODE_USE_{cloud}" for cloud in clouds)),
        arguments=() if served.searches else ("--disallowedTools=WebSearch",),
    )


def codex(served: Served) -> Start:
    """Start Codex with options instead of a ``config.toml``, and a catalog that describes the models to it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    catalog = cache / "penstock" / f"codex-{served.model.replace('/', '-')}.json"
    provider = "model_providers.penstock"
    settings: dict[str, Any] = {
        "model": served.model,
        "model_provider": "penstock",
        "model_catalog_json": str(catalog),
        "web_search": "live" if served.searches else "disabled",
        f"{provider}.name": "OpenAI",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.supports_websockets": True,
    }
    if served.window is not None:
        settings["model_context_window"] = served.window
    if served.key:
        settings[f"{provider}.env_key"] = CLIENT_KEY
    values = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
    return Start(
        {CLIENT_KEY: served.key} if served.key else {},
        arguments=tuple(part for value in values for part in ("-c", value)),
        files={
            catalog: json.dumps({"models": [codex_model(each) for each in (served, *served.others)]}, indent=2) + "\n"
        },
    )


def codex_model(served: Served) -> dict[str, Any]:
    """Return the description of a model for Codex."""
    name, window = served.model, served.window
    efforts = {"low": "Short thoughts", "medium": "Thoughts of a medium length", "high": "Long thoughts"}
    return {
        "slug": name,
        "display_name": name,
        "description": "A model of my own",
        "base_instructions": INSTRUCTIONS,
        **({} if window is None else {"context_window": window}),
        "input_modalities": _modalities(served),
        "apply_patch_tool_type": "freeform",
        "use_responses_lite": False,
        "supports_parallel_tool_calls": True,
        "supports_reasoning_summaries": True,
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [{"effort": effort, "description": text} for effort, text in efforts.items()],
        "support_verbosity": False,
        "shell_type": "shell_command",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }


def _modalities(served: Served) -> list[str]:
    return ["text", "image"] if served.sees_images else ["text"]


def opencode(served: Served) -> Start:
    """Start opencode with a configuration that is added to the user's own; the key stays in a variable."""
    model, window = f"penstock/{served.model}", served.window
    key = f"{{env:{CLIENT_KEY}}}" if served.key else NO_KEY
    config = {
        "provider": {
            "penstock": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "penstock",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": key},
                "models": {
                    served.model: {
                        "name": served.model,
                        "tool_call": True,
                        "reasoning": True,
                        "attachment": served.sees_images,
                        "modalities": {"input": _modalities(served), "output": ["text"]},
                        **({} if window is None else {"limit": {"context": window, "output": served.output}}),
                    },
                    **({served.small: {"name": served.small}} if served.small else {}),
                },
            }
        },
        "model": model,
        "small_model": f"penstock/{served.small or served.model}",
    }
    return Start({"OPENCODE_CONFIG_CONTENT": json.dumps(config)} | ({CLIENT_KEY: served.key} if served.key else {}))


AGENTS = {
    "claude": Agent("claude", "@anthropic-ai/claude-code", version="2.1.332", prompt=10_300, start=claude),
    "codex": Agent("codex", "@openai/codex", version="0.169.0", prompt=4_000, start=codex),
    "opencode": Agent("opencode", "opencode-ai", version="1.18.33", prompt=6_300, start=opencode),
}
