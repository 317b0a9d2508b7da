"""Chat models without vLLM, for an engine elsewhere.

Hugging Face's transformers reads their tokenizer and template, and penstock's own machines the output of some families.
Transformers needs no PyTorch for this.  It is imported inside functions, as it takes seconds and need not be installed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import ChatTurn, GenerationStarted
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Guess, guess
from penstock.stages.models.chat.load import NO_PARSER, ChatModelsNeedVllm, ChatOptions, WrongChatOptions, log_choice
from penstock.stages.models.chat.marked_calls import CallForm, overlap
from penstock.stages.models.chat.model import (
    ChatMessage,
    ChatModel,
    ContentPiece,
    Function,
    OutputParser,
    Piece,
    ReasoningPiece,
    Rendered,
)
from penstock.stages.models.chat.output import ParsedOutput, Traits
from penstock.stages.models.chat.parsers import FORMS, own_syntax
from penstock.stages.models.chat.syntaxes import Syntax
from penstock.stages.models.chat.template import OF_TEMPLATES, refusal
from penstock.stages.models.chat.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_THINK = ("<think>", "</think>")
THOUGHTS: Mapping[str, bool] = {"qwen3": True, "deepseek_r1": True, "deepseek_v3": False}
"""The reasoning parsers that are read here, all with the marks `_THINK`; True if a turn begins with a thought unless
its prompt says otherwise."""

_ENDED_BY_CALLS = frozenset({"qwen3"})
"""Reasoning parsers for which the mark of a call ends a thought, too."""

CALLS: Mapping[str, CallForm] = {**FORMS, "hermes": CallForm(("<tool_call>",), ("</tool_call>",))}
"""The tool call parsers that are read here."""

_PROMPT_END = 8
"""The tokens at the end of a prompt in which a template opens a thought, or closes an empty one."""

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

    Raises `ChatModelsNeedVllm` if only vLLM's parsers read its output, and `WrongChatOptions` for other parsers.
    """
    model_type = files.model_type
    tokenizer = files.tokenizer
    source = _source(options.chat_template)
    templates = [each for each in (source, _own_template(tokenizer)) if each]
    if not templates:
        raise ChatModelsNeedVllm(files.model, "its template is code, which only vLLM has")
    reasoning = _chosen("reasoning", options.reasoning_parser, guess(REASONING, templates, model_type), files.model)
    tool_calls = _chosen("tool-call", options.tool_call_parser, guess(TOOL_CALLS, templates, model_type), files.model)
    vocabulary = Vocabulary(tokenizer)
    ends = files.stop_token_ids | {token for token in (tokenizer.eos_token_id,) if token is not None}
    return ChatModel(
        vocabulary=vocabulary,
        template=HuggingFaceTemplate(tokenizer, source, options.chat_template_content_format),
        parsers=OwnParsers(vocabulary, reasoning, tool_calls),
        stop_token_ids=tuple(sorted(ends)),
        variables=dict(options.default_chat_template_kwargs),
        parser_names=tuple(filter(None, (reasoning, tool_calls))),
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


def _chosen(kind: Literal["reasoning", "tool-call"], option: str | None, guessed: Guess, model: str) -> str | None:
    """Return the name of the parser to use: the operator's ``option``, or else the guess; None for no parser."""
    name = guessed.parser if option is None else option
    if name == NO_PARSER or name is None:
        return None
    if name not in (THOUGHTS if kind == "reasoning" else CALLS):
        raise ChatModelsNeedVllm(model, f"only vLLM has its {kind} parser {name} (--{kind}-parser none: no parser)")
    if option is None:
        log_choice(kind, guessed)
    return name


class HuggingFaceTemplate:
    """The template of a tokenizer, or ``source`` in its place."""

    def __init__(self, tokenizer: Any, source: str | None, content_format: Literal["auto", "string", "openai"]) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._has_parts = content_format == "openai"

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [self._message(message) for message in messages],
                tools=list(functions) or None,
                chat_template=source or self._source,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                tokenize=False,
                **variables,
            )
        except (TemplateError, *OF_TEMPLATES) as error:
            raise refusal(error) from error
        return Rendered(text)

    def _message(self, message: ChatMessage) -> ChatMessage:
        content = message.get("content")
        if self._has_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message


class OwnParsers:
    """Parsers of penstock's own, by the names of those of vLLM; either may be absent."""

    def __init__(self, vocabulary: Vocabulary, reasoning: str | None, tool_calls: str | None) -> None:
        self._marks = vocabulary.marks
        self._reasoning = reasoning
        self._form = CALLS[tool_calls] if tool_calls else None
        self.thinking = _THINK if reasoning else None

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        chat = turn.chat or ChatTurn()
        syntax = own_syntax(chat.calls, self._form, functions)
        if self._reasoning and not chat.continues:
            calls = self._form.begins if self._form and self._reasoning in _ENDED_BY_CALLS else ()
            syntax = ThoughtsFirst(syntax, calls, is_open=chat.thinks or self._is_open(turn.prompt))
        return ParsedOutput(None, None, turn.prompt, Traits(frozenset(self._marks.values())), syntax)

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """Return None: only vLLM describes the syntax of calls."""

    def _is_open(self, prompt: Sequence[int]) -> bool | None:
        """True if the prompt ends in a thought, False if it ends after one, else the habit of the family."""
        start, end = (self._marks.get(mark) for mark in _THINK)
        latest = next((token for token in reversed(prompt[-_PROMPT_END:]) if token in (start, end)), None)
        if latest is None:
            return THOUGHTS[self._reasoning or ""] or None
        return latest == start


class ThoughtsFirst:
    """A thought between `_THINK`, then an answer in the syntax ``after``, or text.

    The marks ``calls`` end a thought, too, and belong to the answer.  With ``is_open``, the output begins in the
    thought, whose first mark may stand in the prompt.  If it is None, a first mark has to begin it; if it is False,
    there is none.
    """

    def __init__(self, after: Syntax | None, calls: Sequence[str] = (), *, is_open: bool | None) -> None:
        self._after = after
        self._ends = (_THINK[1], *calls)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._is_open = is_open
        self._has_begun = is_open is False
        """True once it is certain if there is a thought."""
        self._held = ""
        self.triggers = frozenset("<") | (after.triggers if after else frozenset())

    @property
    def is_at_rest(self) -> bool:
        if not self._has_begun or self._held:
            return False
        return bool(self._is_open) or self._after is None or self._after.is_at_rest

    def feed(self, text: str) -> Iterator[Piece]:
        self._held += text
        if not self._has_begun:
            self._begin()
        if self._has_begun and self._is_open:
            yield from self._think()
        if self._has_begun and not self._is_open and self._held:
            text, self._held = self._held, ""
            yield from self._after.feed(text) if self._after else (ContentPiece(text),)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        text, self._held = self._held, ""
        if text and self._is_open:
            yield ReasoningPiece(text)
        elif text:
            yield from self._after.feed(text) if self._after else (ContentPiece(text),)
        if self._after:
            yield from self._after.finish(cut=cut)

    def _begin(self) -> None:
        start, begun = _THINK[0], self._held.lstrip()
        if start.startswith(begun) and begun != start:
            return
        self._has_begun = True
        if begun.startswith(start):
            self._is_open, self._held = True, begun.removeprefix(start)

    def _think(self) -> Iterator[Piece]:
        if end := self._end.search(self._held):
            at, rest_at = end.start(), end.end() if end[0] == _THINK[1] else end.start()
            self._is_open = False
        else:
            at = rest_at = len(self._held) - overlap(self._held, self._ends)
        thought, self._held = self._held[:at], self._held[rest_at:]
        yield from [ReasoningPiece(thought)] if thought else ()
