"""The variables of a chat template: what the operator set, what the request's effort means, what the request says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import Conversation
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
"""What is said to the renderer under these names is for the server to say."""


def variables(chat: ChatModel, conversation: Conversation) -> Mapping[str, Any]:
    """The variables of the next prompt.  Raises `InvalidRequest` for what a request may not say."""
    options = conversation.template
    if reserved := sorted(_OURS & options.variables.keys()):
        raise InvalidRequest(f"Not a variable of the template: {', '.join(reserved)}.", param="chat_template_kwargs")
    if options.source is not None and not chat.trusts_templates:
        raise InvalidRequest("This server takes no chat templates from requests.", param="chat_template")
    return {**chat.variables, **_of_effort(conversation.response.reasoning.effort), **options.variables}


def _of_effort(effort: str | None) -> Mapping[str, Any]:
    """How templates are told of an effort, under the names that are in use; each reads those that it knows."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
