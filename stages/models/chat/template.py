"""The chat template of a model, rendered by vLLM.

vLLM's renderer handles the differences between templates: message content as text or as parts, with or without a
developer role.  It also handles models that have code instead of a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.models.chat.model import ChatMessage, Function, Rendered

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer

_DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""An image of one pixel, put in place of every image: rendered text has placeholders for images, not their content."""

OF_TEMPLATES = (ValueError, TypeError, LookupError, AssertionError, ArithmeticError, RecursionError)
"""Exceptions that templates and their compilation raise, besides jinja2's own."""


class VllmTemplate:
    """The template of the model of ``renderer``, or ``source`` in its place.

    ``content_format`` is the form of message content that the template takes (vLLM's
    ``--chat-template-content-format``).
    """

    def __init__(
        self,
        renderer: BaseRenderer[Any],
        source: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
    ) -> None:
        from vllm.utils.mistral import is_mistral_tokenizer

        self._renderer = renderer
        self._source = source
        self._content_format = content_format
        self._gives_tokens = is_mistral_tokenizer(renderer.tokenizer)

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        from vllm.renderers.params import ChatParams

        params = ChatParams(
            chat_template=source or self._source,
            chat_template_content_format=self._content_format,
            chat_template_kwargs={
                **variables,
                "tools": list(functions) or None,
                "add_generation_prompt": not continues,
                "continue_final_message": continues,
                "tokenize": self._gives_tokens,
            },
        )
        prompt = self._prompt([_own(message, keep_images=self._gives_tokens) for message in messages], params)
        return Rendered(prompt.get("prompt", ""), tuple(prompt.get("prompt_token_ids", ())))

    def _prompt(self, messages: list[ChatMessage], params: Any) -> Mapping[str, Any]:
        from jinja2 import TemplateError
        from vllm.exceptions import VLLMClientError

        try:
            rendered: tuple[Any, Mapping[str, Any]] = self._renderer.render_messages(messages, params)
        except (VLLMClientError, TemplateError, *OF_TEMPLATES) as error:
            raise refusal(error) from error
        return rendered[1]


def refusal(error: Exception) -> InvalidRequest:
    """Return the error for the client when a template raised ``error``."""
    reason = str(error.args[0]) if error.args else type(error).__name__
    return InvalidRequest(f"The model's chat template refuses this conversation: {reason}", param="input")


def _own(message: ChatMessage, *, keep_images: bool) -> ChatMessage:
    """Copy a message, because vLLM parses the arguments of its calls in place.

    Images become `_DOT`, unless ``keep_images``.
    """
    own = dict(message)
    if calls := message.get("tool_calls"):
        own["tool_calls"] = [{**call, "function": dict(call["function"])} for call in calls]
    if isinstance(parts := message.get("content"), list) and not keep_images:
        own["content"] = [
            {"type": "image_url", "image_url": {"url": _DOT}} if part["type"] == "image_url" else part for part in parts
        ]
    return own
