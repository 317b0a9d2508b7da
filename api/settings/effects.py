"""The settings that have no effect with the engine that answers.  The log names them: none is ignored in silence."""

from __future__ import annotations

import logging
from enum import Enum

from pydantic_settings import CLI_SUPPRESS

from penstock.api.settings import Settings
from penstock.api.settings.engine_settings import ChatSettings
from penstock.api.settings.sources import variable

logger = logging.getLogger(__name__)

_OF_TEMPLATES = frozenset(ChatSettings.__annotations__) & Settings.model_fields.keys()
_OF_PLACES = frozenset({"engine_places", "engine_wait"})
_OF_TURNS = frozenset({"hints", "shadow", "shadow_share", "shadow_key"})
_OF_TOOLS = frozenset(
    {"mcp_config", "tool", "allow_tool", "web_search", "web_search_key", "allow_address", "tool_timeout", "max_turns"}
    | {"container_ttl", "container_memory", "program_ttl"}
)


class Answering(Enum):
    """The kinds of what answers, each with the settings that it does not use."""

    HERE = "vLLM runs in this process", frozenset({"replay_speed", "engine_key"})
    OVER_HTTP = "the engine is elsewhere", frozenset({"replay_speed", "vllm", "exit_with_engine"})
    OWN = "the engine is your own", frozenset({"replay_speed", "vllm", "kv_events"})
    TEXTS = (
        "a backend of texts answers",
        frozenset({"replay_speed", "vllm", "kv_events"}) | _OF_TEMPLATES | _OF_PLACES | _OF_TURNS,
    )
    RECORDINGS = (
        "recordings answer",
        frozenset({"engine_key", "kv_events", "share_caches", "salt_caches", "vllm", "exit_with_engine"})
        | _OF_TEMPLATES
        | _OF_PLACES
        | _OF_TOOLS
        | _OF_TURNS,
    )

    @property
    def reason(self) -> str:
        """The reason why the settings have no effect."""
        return self.value[0]

    @property
    def unused(self) -> frozenset[str]:
        """The names of the settings without an effect."""
        return self.value[1]


def warn_of_unused(settings: Settings, answering: Answering) -> None:
    """Log the settings that the operator made without an effect."""
    names = [name for name in Settings.model_fields if name in settings.model_fields_set & answering.unused]
    if names:
        logger.warning("No effect, as %s: %s", answering.reason, ", ".join(map(_shown, names)))


def _shown(name: str) -> str:
    """Return a setting as the operator writes it."""
    if name == "vllm":
        return "[vllm]"
    is_option = CLI_SUPPRESS not in Settings.model_fields[name].metadata
    return f"--{name.replace('_', '-')}" if is_option else variable(name)
