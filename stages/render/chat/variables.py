"""The variables of a chat template: the operator's, then the request's reasoning effort, then the request's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest
from penstock.stages.models.chat.model import ChatModel

_OURS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""The renderer's own parameters, which only the server may set."""


def variables(chat: ChatModel, conversation: ResolvedRequest) -> Mapping[str, Any]:
    """Return the variables of the next prompt.

    Later sources override earlier ones.  Raises `InvalidRequest` if the request sets a reserved variable, or brings a
    chat template that the server does not accept.
    """
    options = conversation.facts.template
    if reserved := sorted(_OURS & options.variables.keys()):
        raise InvalidRequest(f"Not a variable of the template: {', '.join(reserved)}.", param="chat_template_kwargs")
    if options.source is not None and not chat.trusts_templates:
        raise InvalidRequest("This server takes no chat templates from requests.", param="chat_template")
    return {**chat.variables, **_of_effort(conversation.facts.response.reasoning.effort), **options.variables}


def _of_effort(effort: str | None) -> Mapping[str, Any]:
    """Return an effort as template variables, under all names in use: a template reads the names that it knows."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
