"""Loading a chat model, from the engine of this process or, for a remote engine, from the model's files.

The template, the tokenizer and the output parsers are vLLM's.  vLLM is imported inside functions, because importing it
is slow and it need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from penstock.pipeline.errors import CannotStart
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
"""The option value that turns a parser off."""


class ChatModelsNeedVllm(CannotStart):
    """vLLM is not installed; chat models need its templates and parsers."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has a chat template, for which penstock needs vLLM's code also where the engine runs elsewhere: "
            "install vllm, or its CPU build as `make install` does."
        )


class WrongChatOptions(CannotStart):
    """An option names a template or parser that vLLM does not have, or that does not fit the model."""


@dataclass(frozen=True)
class ChatOptions:
    """The operator's options for a chat model; None means that the model decides."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False


def load_chat_model(config: VllmConfig, options: ChatOptions, renderer: BaseRenderer[Any] | None = None) -> ChatModel:
    """Build the chat model of ``config``, with the ``renderer`` of this process's engine if there is one.

    Raises `WrongChatOptions` for options that do not fit the model, and `UnknownParser` for parsers that do not fit
    each other.
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
    """Read the config of ``model``, a folder or a Hugging Face id, without its weights and without a device."""
    if find_spec("vllm") is None:
        raise ChatModelsNeedVllm(model)
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    model_config = AsyncEngineArgs(model=model).create_model_config()
    model_config.quantization = None  # vLLM would check that the device supports its kernels
    return VllmConfig(model_config=model_config)


def _parsers(
    model: ModelConfig, tokenizer: Any, source: str | None, options: ChatOptions
) -> tuple[str | None, str | None]:
    """Return the names of the reasoning and the tool call parser, by the operator's choice or by a guess."""
    template = source or _own_template(model, tokenizer)
    kind = model.hf_config.model_type
    reasoning = _Parser("reasoning")
    tool_calls = _Parser("tool-call")
    return (
        reasoning.chosen(options.reasoning_parser, guess(REASONING, template, kind), tokenizer),
        tool_calls.chosen(options.tool_call_parser, guess(TOOL_CALLS, template, kind), tokenizer),
    )


def _own_template(model: ModelConfig, tokenizer: Any) -> str:
    """Return the template that the model came with; empty if it has none in text form."""
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers.hf import HfTokenizer

    if not isinstance(tokenizer, HfTokenizer):
        return ""
    return resolve_chat_template(tokenizer, None, [], model_config=model) or ""


@dataclass(frozen=True)
class _Parser:
    """The choice of one of the two parsers."""

    what: Literal["reasoning", "tool-call"]

    def chosen(self, name: str | None, guessed: Guess, tokenizer: Any) -> str | None:
        """Return the name of the parser to use, or None.

        Raises `WrongChatOptions` if the operator named a parser that does not fit.  A guess that does not fit is only
        logged.
        """
        if name == NO_PARSER:
            return None
        if name is not None:
            if problem := self._problem(name, tokenizer):
                raise WrongChatOptions(f"--{self.what}-parser {name}: {problem}")
            return name
        if guessed.parser is None:
            logger.info("No %s parser: %s", self.what, guessed.why)
            return None
        if problem := self._problem(guessed.parser, tokenizer):
            logger.warning("No %s parser: %s would fit, as %s, but %s", self.what, guessed.parser, guessed.why, problem)
            return None
        logger.info("The %s parser is %s, as %s", self.what, guessed.parser, guessed.why)
        return guessed.parser

    def _problem(self, name: str, tokenizer: Any) -> str | None:
        """Return vLLM's objection to this parser with this tokenizer, or None."""
        try:
            composed((name, None) if self.what == "reasoning" else (None, name), tokenizer)
        except UnknownParser as error:
            return str(error)
        return None


def _stop_token_ids(model: ModelConfig, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end the model's turn: the tokenizer's and those of the generation config."""
    eos = model.try_get_generation_config().get("eos_token_id") or []
    ids = {eos} if isinstance(eos, int) else set(eos)
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def _sees_images(model: ModelConfig, renderer: BaseRenderer[Any]) -> bool:
    """True if prompts may hold images.  A limit of None means that vLLM sets none."""
    if not model.is_multimodal_model or renderer.mm_processor is None:
        return False
    limits: Mapping[str, int | None] = renderer.mm_processor.info.allowed_mm_limits
    return limits.get("image", 0) != 0
