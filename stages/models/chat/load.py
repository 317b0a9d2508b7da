"""Loading a chat model: from the engine of this process, or without one, for an engine elsewhere.

Its template, its tokenizer and what reads its output are vLLM's, which is imported here inside functions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Guess, guess
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import UnknownParser, VllmParsers, composed
from penstock.stages.models.chat.template import VllmTemplate
from penstock.stages.models.chat.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers.base import BaseRenderer

logger = logging.getLogger(__name__)

NO_PARSER = "none"
"""What an operator says who wants no parser."""


class ChatModelsNeedVllm(ImportError):
    """There is no vLLM here, whose templates and parsers chat models need."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has a chat template, for which penstock needs vLLM's code also where the engine runs elsewhere: "
            "install vllm, or its CPU build as `make install` does."
        )


class WrongChatOptions(ValueError):
    """Options that the model, or vLLM, knows nothing of."""


@dataclass(frozen=True)
class ChatOptions:
    """What an operator says of a chat model; None leaves it to the model."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False


def load_chat_model(config: VllmConfig, options: ChatOptions, renderer: BaseRenderer[Any] | None = None) -> ChatModel:
    """The model of ``config``, with the renderer that an engine of this process has, if there is one.

    Raises `WrongChatOptions` for options that do not fit it, and `UnknownParser` for parsers that do not fit each
    other.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import load_chat_template, validate_chat_template
    from vllm.renderers.registry import renderer_from_config

    renderer = renderer or renderer_from_config(config)
    model, tokenizer = config.model_config, renderer.tokenizer
    try:
        validate_chat_template(options.chat_template)
        source = load_chat_template(options.chat_template)
    except (VLLMValidationError, OSError) as error:
        raise WrongChatOptions(f"--chat-template: {error}") from error
    reasoning, tool_calls = _parsers(model, tokenizer, source, options)
    return ChatModel(
        vocabulary=Vocabulary(tokenizer),
        template=VllmTemplate(renderer, source, options.chat_template_content_format),
        parsers=VllmParsers(tokenizer, reasoning, tool_calls, model),
        stop_token_ids=_stop_token_ids(model, tokenizer),
        variables=dict(options.default_chat_template_kwargs),
        sampling=model.get_diff_sampling_param(),
        parser_names=tuple(filter(None, (reasoning, tool_calls))),
        sees_images=_sees_images(model, renderer),
        trusts_templates=options.trust_request_chat_template,
    )


def read_config(model: str) -> VllmConfig:
    """What is to be known of ``model``, a folder or a Hugging Face id, without its weights and without a device."""
    if find_spec("vllm") is None:
        raise ChatModelsNeedVllm(model)
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    model_config = AsyncEngineArgs(model=model).create_model_config()
    model_config.quantization = None  # whose kernels a device would have to know
    return VllmConfig(model_config=model_config)


def _parsers(
    model: ModelConfig, tokenizer: Any, source: str | None, options: ChatOptions
) -> tuple[str | None, str | None]:
    """The names of the parsers of reasoning and of calls: what the operator says, or else what the model shows."""
    template = source or _own_template(model, tokenizer)
    kind = model.hf_config.model_type
    reasoning = _Parser("reasoning")
    tool_calls = _Parser("tool-call")
    return (
        reasoning.chosen(options.reasoning_parser, guess(REASONING, template, kind), tokenizer),
        tool_calls.chosen(options.tool_call_parser, guess(TOOL_CALLS, template, kind), tokenizer),
    )


def _own_template(model: ModelConfig, tokenizer: Any) -> str:
    """The template that the model came with; empty where it is none in text."""
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers.hf import HfTokenizer

    if not isinstance(tokenizer, HfTokenizer):
        return ""
    return resolve_chat_template(tokenizer, None, [], model_config=model) or ""


@dataclass(frozen=True)
class _Parser:
    """One of the two parsers."""

    what: Literal["reasoning", "tool-call"]

    def chosen(self, said: str | None, guessed: Guess, tokenizer: Any) -> str | None:
        """What the operator said, which has to fit, or what was guessed, if it fits."""
        if said == NO_PARSER:
            return None
        if said is not None:
            if problem := self._problem(said, tokenizer):
                raise WrongChatOptions(f"--{self.what}-parser {said}: {problem}")
            return said
        if guessed.parser is None:
            logger.info("No %s parser: %s", self.what, guessed.why)
            return None
        if problem := self._problem(guessed.parser, tokenizer):
            logger.warning("No %s parser: %s would fit, as %s, but %s", self.what, guessed.parser, guessed.why, problem)
            return None
        logger.info("The %s parser is %s, as %s", self.what, guessed.parser, guessed.why)
        return guessed.parser

    def _problem(self, name: str, tokenizer: Any) -> str | None:
        """What vLLM has against this parser with this tokenizer."""
        try:
            composed((name, None) if self.what == "reasoning" else (None, name), tokenizer)
        except UnknownParser as error:
            return str(error)
        return None


def _stop_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """What ends the model's turn: the tokenizer says one, and the generation config may say more."""
    said = model.try_get_generation_config().get("eos_token_id") or []
    ids = {said} if isinstance(said, int) else set(said)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _sees_images(model: ModelConfig, renderer: BaseRenderer[Any]) -> bool:
    """Whether prompts may hold images: None is a limit that nobody has set."""
    if not model.is_multimodal_model or renderer.mm_processor is None:
        return False
    limits: Mapping[str, int | None] = renderer.mm_processor.info.allowed_mm_limits
    return limits.get("image", 0) != 0
