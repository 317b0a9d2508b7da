"""Loading a chat model, from the engine of this process or, for a remote engine, from the model's files.

The template, the tokenizer and the output parsers are vLLM's; `.standalone` loads some models without it.  vLLM is
imported inside functions, because importing it is slow and it need not be installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.pipeline.distribution import vllm_requirement
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.plugins import imported
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Guess, Sign, guess
from penstock.stages.models.chat.model import ChatModel, Parsers
from penstock.stages.models.chat.parsers import NamedParsers, UnknownParser, composed, registered
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS, NamedParser, operator_parser
from penstock.stages.models.chat.template import VllmTemplate
from penstock.stages.models.chat.vocabulary import Vocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.renderers.base import BaseRenderer

logger = logging.getLogger(__name__)

ParserKind: TypeAlias = Literal["reasoning", "tool-call"]

NO_PARSER = "none"
"""The option value that turns a parser off."""


class ChatModelsNeedVllm(CannotStart):
    """vLLM is not installed, and the model cannot be served without its code."""

    def __init__(self, model: str, why: str) -> None:
        super().__init__(
            f"{model} has a chat template, and {why}: pip install '{vllm_requirement()}', or the CPU build "
            "as docs/INSTALL.md says, even if the engine runs elsewhere."
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
    reasoning_parser_plugin: str | None = None
    tool_parser_plugin: str | None = None

    def import_plugins(self) -> None:
        """Import the files or modules that register parsers with vLLM; raise `WrongPlugin` if that fails."""
        for option, place in (
            ("--reasoning-parser-plugin", self.reasoning_parser_plugin),
            ("--tool-parser-plugin", self.tool_parser_plugin),
        ):
            if place:
                imported(place, place, option)


def load_chat_model(config: VllmConfig, options: ChatOptions, renderer: BaseRenderer[Any] | None = None) -> ChatModel:
    """Build the chat model of ``config``, with the ``renderer`` of this process's engine if there is one.

    Raises `WrongChatOptions` for options that do not fit the model, `UnknownParser` for parsers that do not fit each
    other, and `WrongPlugin` for a parser of the operator's that cannot be used.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import load_chat_template, validate_chat_template
    from vllm.renderers.registry import renderer_from_config

    options.import_plugins()
    renderer = renderer or renderer_from_config(config)
    model, tokenizer = config.model_config, renderer.tokenizer
    try:
        validate_chat_template(options.chat_template)
        source = load_chat_template(options.chat_template)
    except (VLLMValidationError, OSError) as error:
        raise WrongChatOptions(f"--chat-template: {error}") from error
    templates = [template for template in (source, _own_template(model, tokenizer)) if template] or [""]
    model_type = model.hf_config.model_type

    def check(kind: ParserKind, name: str) -> None:
        composed((name, None) if kind == "reasoning" else (None, name), tokenizer)

    tool_calls = chosen_parser("tool-call", options.tool_call_parser, guess(TOOL_CALLS, templates, model_type), check)
    signs: tuple[Sign, ...] = REASONING
    if isinstance(tool_calls, str) and tool_calls not in OWN_CALLS:
        known, _ = registered()
        signs = tuple(sign for sign in REASONING if sign.parser in known)  # vLLM reads the thoughts, too
    reasoning = chosen_parser("reasoning", options.reasoning_parser, guess(signs, templates, model_type), check)
    parsers = NamedParsers(tokenizer, reasoning, tool_calls, model)
    log_undescribed(parsers, tool_calls)
    return ChatModel(
        vocabulary=Vocabulary(tokenizer),
        template=VllmTemplate(renderer, source, options.chat_template_content_format),
        parsers=parsers,
        stop_token_ids=_stop_token_ids(model, tokenizer),
        variables=dict(options.default_chat_template_kwargs),
        parser_names=tuple(map(str, filter(None, (reasoning, tool_calls)))),
        sees_images=_sees_images(model, renderer),
        trusts_templates=options.trust_request_chat_template,
    )


def read_config(model: str) -> VllmConfig:
    """Read the config of ``model``, a folder or a Hugging Face id, without its weights and without a device."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    model_config = AsyncEngineArgs(model=model).create_model_config()
    model_config.quantization = None  # vLLM would check that the device supports its kernels
    return VllmConfig(model_config=model_config)


def _own_template(model: ModelConfig, tokenizer: Any) -> str:
    """Return the template that the model came with; empty if it has none in text form."""
    from vllm.renderers.hf import resolve_chat_template
    from vllm.tokenizers.hf import HfTokenizer

    if not isinstance(tokenizer, HfTokenizer):
        return ""
    return resolve_chat_template(tokenizer, None, [], model_config=model) or ""


def chosen_parser(
    kind: ParserKind, option: str | None, guessed: Guess, check: Callable[[ParserKind, str], object]
) -> NamedParser:
    """Return the parser to use: that of the operator's ``option``, or else the guess; None for no parser.

    ``check`` raises `UnknownParser` if one that penstock has not itself does not fit: as an option, that is raised as
    `WrongChatOptions`, and as a guess, it is only logged.  Raises `WrongPlugin`, too.
    """
    if option and (own := operator_parser(option, f"--{kind}-parser")):
        return own
    name = guessed.parser if option is None else option
    if name == NO_PARSER:
        return None
    if name is not None and name not in (OWN_THOUGHTS if kind == "reasoning" else OWN_CALLS):
        try:
            check(kind, name)
        except UnknownParser as error:
            if option is not None:
                raise WrongChatOptions(f"--{kind}-parser {name}: {error}") from error
            logger.warning("No %s parser: %s would fit, as %s, but %s", kind, name, guessed.why, error)
            return None
    if option is None:
        _log_choice(kind, guessed)
    return name


def _log_choice(kind: ParserKind, guessed: Guess) -> None:
    """Log a guess that is followed, its reason, and what speaks against it."""
    if guessed.parser is None:
        level = logging.WARNING if guessed.doubt else logging.INFO
        hint = f"; --{kind}-parser names one" if guessed.doubt else ""
        logger.log(level, "No %s parser: %s%s", kind, guessed.doubt or guessed.why, hint)
        return
    logger.info("The %s parser is %s, as %s", kind, guessed.parser, guessed.why)
    if guessed.doubt:
        logger.warning("The %s parser may be wrong: %s; --%s-parser names it", kind, guessed.doubt, kind)


_ANY_FUNCTION = {"type": "function", "function": {"name": "f", "strict": False}}


def log_undescribed(parsers: Parsers, tool_calls: NamedParser) -> None:
    """Log that no grammar can hold calls to the family's own form, if so."""
    if tool_calls and parsers.calls((_ANY_FUNCTION,), parallel=True) is None:
        logger.info("Calls that must be made are written as JSON: no grammar describes those of %s", tool_calls)


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
