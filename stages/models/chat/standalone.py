"""Chat models without vLLM, for an engine elsewhere.

Hugging Face's transformers reads their tokenizer and template, and penstock's own machines the output of some families.
Transformers needs no PyTorch for this.  It is imported inside functions, as it takes seconds and need not be installed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from penstock.pipeline.errors import CannotStart, InvalidRequest
from penstock.pipeline.frames import ChatTurn, GenerationStarted
from penstock.stages.models.chat.content import as_template_takes, text_part
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, guess
from penstock.stages.models.chat.load import (
    ChatModelsNeedVllm,
    ChatOptions,
    ParserKind,
    WrongChatOptions,
    chosen_parser,
    log_undescribed,
)
from penstock.stages.models.chat.model import ChatMessage, ChatModel, Function, OutputParser, Rendered
from penstock.stages.models.chat.output import ReadOutput
from penstock.stages.models.chat.registry import (
    OWN_CALLS,
    OWN_THOUGHTS,
    call_id,
    calls_format,
    made,
    reader,
    thinking,
    tokens_of_marks,
)
from penstock.stages.models.chat.syntaxes import Answered, MakeSyntax, OutputStart, wants_no_thought
from penstock.stages.models.chat.template import OF_TEMPLATES, refusal
from penstock.stages.models.chat.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_SAMPLING = {
    **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
    "max_new_tokens": "max_tokens",
}
"""The fields of a generation config that are defaults of requests, with vLLM's names."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model: those in a folder, or of a Hugging Face id."""

    model: str

    @property
    def model_type(self) -> str:
        return str(self._read("config.json").get("model_type", ""))

    @property
    def speaks_harmony(self) -> bool:
        """True if the model is a gpt-oss."""
        return self.model_type == "gpt_oss"

    @property
    def sampling(self) -> Mapping[str, float]:
        """The sampling defaults of the model, by vLLM's names."""
        return {ours: value for name, ours in _SAMPLING.items() if (value := self._generation.get(name)) is not None}

    @property
    def stop_token_ids(self) -> set[int]:
        """The tokens that end the model's turn by its generation config."""
        eos = self._generation.get("eos_token_id") or []
        return {eos} if isinstance(eos, int) else set(eos)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model)
        except (ImportError, OSError, ValueError) as error:
            raise ChatModelsNeedVllm(self.model, f"its tokenizer cannot be read without vLLM ({error})") from error

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        return self._read("generation_config.json")

    def _read(self, name: str) -> Mapping[str, Any]:
        if find_spec("transformers") is None or find_spec("jinja2") is None:
            raise ChatModelsNeedVllm(
                self.model, "neither vLLM is installed nor transformers with jinja2, which suffice for some"
            )
        from transformers.utils.hub import cached_file

        try:
            path = cached_file(self.model, name, _raise_exceptions_for_missing_entries=name == "config.json")
        except OSError as error:
            raise CannotStart(f"The model {self.model} cannot be read: {error}") from error
        found: Mapping[str, Any] = json.loads(Path(path).read_text()) if path else {}
        return found


def load_from_files(files: ModelFiles, options: ChatOptions) -> ChatModel:
    """Build the chat model of ``files``.

    Raises `ChatModelsNeedVllm` if only vLLM's parsers read its output, `WrongChatOptions` for a template that cannot be
    read, and `WrongPlugin` for a parser of the operator's that cannot be used.
    """
    if plugin := options.reasoning_parser_plugin or options.tool_parser_plugin:
        raise ChatModelsNeedVllm(files.model, f"{plugin} registers its parser with vLLM")
    model_type = files.model_type
    tokenizer = files.tokenizer
    source = _source(options.chat_template)
    templates = [each for each in (source, _own_template(tokenizer)) if each]
    if not templates:
        raise ChatModelsNeedVllm(files.model, "its template is code, which only vLLM has")

    def check(kind: ParserKind, name: str) -> None:
        raise ChatModelsNeedVllm(
            files.model, f"only vLLM has its {kind} parser {name} (--{kind}-parser none: no parser)"
        )

    reasoning = chosen_parser("reasoning", options.reasoning_parser, guess(REASONING, templates, model_type), check)
    tool_calls = chosen_parser("tool-call", options.tool_call_parser, guess(TOOL_CALLS, templates, model_type), check)
    vocabulary = Vocabulary(tokenizer)
    marks = vocabulary.marks
    parsers = OwnParsers(vocabulary, made(reasoning, OWN_THOUGHTS, marks), made(tool_calls, OWN_CALLS, marks))
    log_undescribed(parsers, tool_calls)
    ends = files.stop_token_ids | {token for token in (tokenizer.eos_token_id,) if token is not None}
    return ChatModel(
        vocabulary=vocabulary,
        template=HuggingFaceTemplate(tokenizer, source, options.chat_template_content_format),
        parsers=parsers,
        stop_token_ids=tuple(sorted(ends)),
        variables=dict(options.default_chat_template_kwargs),
        parser_names=tuple(map(str, filter(None, (reasoning, tool_calls)))),
        trusts_templates=options.trust_request_chat_template,
    )


def _source(template: str | None) -> str | None:
    """Return the text of ``--chat-template``, which is a template or the path of one."""
    if template is None or any(each in template for each in "{}\n"):
        return template
    try:
        return Path(template).read_text()
    except OSError as error:
        raise WrongChatOptions(f"--chat-template: {error}") from error


def _own_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:  # it has none
        return ""


_PROBE = "Hello"
_SHOWN_PART = re.compile(rf"""text['"\\]*\s*:\s*['"\\]*{_PROBE}""")

_DETECTED_TEMPLATES = 32
"""Templates whose content format is remembered: requests may bring their own."""


class HuggingFaceTemplate:
    """The template of a tokenizer, or ``source`` in its place."""

    def __init__(self, tokenizer: Any, source: str | None, content_format: Literal["auto", "string", "openai"]) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._content_format = content_format
        self._takes_parts = lru_cache(_DETECTED_TEMPLATES)(self._detect_parts)

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        template = source or self._source
        parts = self._content_format == "openai" or (self._content_format == "auto" and self._takes_parts(template))
        return Rendered(
            self._rendered(
                [as_template_takes(message, parts=parts) for message in messages],
                tools=list(functions) or None,
                chat_template=template,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **variables,
            )
        )

    def _rendered(self, messages: list[ChatMessage], **settings: Any) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **settings))
        except (TemplateError, *OF_TEMPLATES) as error:
            raise refusal(error) from error

    def _detect_parts(self, template: str | None) -> bool:
        """Return True if a template shows the text of a part, and not the part as a dict or as JSON."""
        try:
            shown = self._rendered([{"role": "user", "content": [text_part(_PROBE)]}], chat_template=template)
        except InvalidRequest:  # a template that knows texts alone may refuse a list of parts
            return False
        return _PROBE in shown and not _SHOWN_PART.search(shown)


class OwnParsers:
    """Parsers that are not vLLM's; either may be absent."""

    def __init__(self, vocabulary: Vocabulary, reasoning: MakeSyntax | None, calls: MakeSyntax | None) -> None:
        self._marks = vocabulary.marks
        self._decode = vocabulary.decode
        self._reasoning = reasoning
        self._calls = calls
        self._tokens = tokens_of_marks((reasoning, calls), vocabulary.marks)
        self.thinking = thinking(reasoning)
        self.call_id = call_id(calls)

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        chat = turn.chat or ChatTurn()
        reasoning = None if chat.continues else self._reasoning
        start = OutputStart(
            functions,
            prompt=turn.prompt,
            marks=self._marks,
            thinks=chat.thinks,
            decode=self._decode,
            wants_no_thought=wants_no_thought(chat.variables),
        )
        syntax = reader(reasoning, self._calls, chat.calls, start)
        must_answer = chat.variables.get("force_nonempty_content")
        return ReadOutput(Answered(syntax) if syntax and must_answer else syntax, self._tokens)

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """Return the syntax that the family's description has; None if only vLLM describes it."""
        return calls_format(self._calls, functions, self._marks, parallel=parallel)
