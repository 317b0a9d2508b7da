"""The parsers of a chat model by their names: a reader of `forms`, one of the operator, or vLLM's parser."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.pipeline.errors import CannotStart
from penstock.pipeline.frames import ChatTurn, GenerationStarted
from penstock.stages.models.chat.model import Function, OutputParser
from penstock.stages.models.chat.output import ParsedOutput, ReadOutput, Traits
from penstock.stages.models.chat.registry import (
    OWN_CALLS,
    OWN_THOUGHTS,
    NamedParser,
    call_id,
    calls_format,
    made,
    reader,
    thinking,
    tokens_of_marks,
)
from penstock.stages.models.chat.syntaxes import Answered, OutputStart, wants_no_thought
from penstock.stages.models.vllm_private import (
    changes_input,
    check_parser_parts,
    only_delegates,
    parser_engine,
    takes_any_name,
)

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser

logger = logging.getLogger(__name__)

Names: TypeAlias = tuple[str | None, str | None]
"""The names of the reasoning parser and the tool call parser."""


class UnknownParser(CannotStart):
    """There is no parser with that name, or it does not fit the model."""


class NamedParsers:
    """The parsers of one model by their names: penstock's own readers first, else vLLM's; either may be absent.

    Raises `UnknownParser` for a name that neither has, for a parser that does not fit the tokenizer, or for two
    that do not fit each other, and `UnknownVllm` if vLLM is not a release that penstock knows.
    """

    def __init__(
        self,
        tokenizer: Any,
        reasoning_parser: NamedParser = None,
        tool_call_parser: NamedParser = None,
        model_config: Any = None,
    ) -> None:
        check_parser_parts()
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._added: Mapping[str, int] = tokenizer.get_added_vocab()
        self._marks = frozenset({*self._added.values(), *tokenizer.all_special_ids})
        self._reasoning = made(reasoning_parser, OWN_THOUGHTS, self._added)
        self._calls = made(tool_call_parser, OWN_CALLS, self._added)
        self._tokens = tokens_of_marks((self._reasoning, self._calls), self._added)
        of_vllm = (_of_vllm(reasoning_parser), _of_vllm(tool_call_parser))
        if of_vllm[1] and not self._calls:
            if self._reasoning and of_vllm[0] is None:
                raise UnknownParser(
                    f"The reasoning parser {reasoning_parser} is not vLLM's, so it needs a tool call parser that is "
                    f"not vLLM's either, or none: {of_vllm[1]} is vLLM's"
                )
            self._reasoning = None
        self._names = (None if self._reasoning else of_vllm[0], None if self._calls else of_vllm[1])
        """The parsers of vLLM that read."""
        self._described = of_vllm[1] if isinstance(of_vllm[1], str) and of_vllm[1] in registered()[1] else None
        """The tool call parser of vLLM that describes the syntax of calls."""
        self._classes: dict[Names, type[Parser] | None] = {}
        self._traits: dict[Names, Traits] = {}
        parser = self._parser(self._names, {}, None)
        marks = parser and parser.reasoning_parser
        start, end = (marks.reasoning_start_str, marks.reasoning_end_str) if marks else (None, None)
        self.thinking = (start, end) if start and end else thinking(self._reasoning)
        self.call_id = call_id(self._calls)

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        try:
            return self._started(turn, functions)
        except Exception:  # schemas and variables come from the client, and vLLM fails on unusual ones
            logger.warning("No parser can be made: the output is passed on as text", exc_info=True)
            return ReadOutput(None)

    def _started(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        chat = turn.chat or ChatTurn()
        own = None if chat.continues else self._reasoning
        start = OutputStart(
            functions,
            prompt=turn.prompt,
            marks=self._added,
            thinks=chat.thinks,
            decode=self._decode,
            wants_no_thought=wants_no_thought(chat.variables),
        )
        syntax = reader(own, self._calls, chat.calls, start)
        names = (None if chat.continues else self._names[0], self._names[1] if chat.calls == "native" else None)
        request = self._request(functions, chat.variables)
        parser = self._parser(names, chat.variables, request)
        if parser is None:
            must_answer = chat.variables.get("force_nonempty_content")
            return ReadOutput(Answered(syntax) if syntax and must_answer else syntax, self._tokens)
        traits = self._known(names, parser)
        if chat.variables.get("force_nonempty_content"):
            traits = replace(traits, triggers=None)  # the parser repeats the thought as the answer, and so reads it all
        return ParsedOutput(
            parser, request=parser.adjust_request(request), prompt=turn.prompt, traits=traits, syntax=syntax
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        if own := calls_format(self._calls, functions, self._added, parallel=parallel):
            return own
        from vllm.tool_parsers.structural_tag_registry import limit_to_single_tool_call

        request = self._request(functions, {}, choice="required")
        try:
            parser = self._parser((None, self._described), {}, request)
        except UnknownParser:  # it needs what only vLLM's reader of calls needs
            return None
        tag = parser.tool_parser.get_structural_tag(request) if parser and parser.tool_parser else None
        if tag is None:
            return None
        if not parallel:
            limit_to_single_tool_call(tag)
        described: dict[str, Any] = tag.format.model_dump()
        return described

    def _parser(self, names: Names, variables: Mapping[str, Any], request: Any) -> Parser | None:
        if names not in self._classes:
            self._classes[names] = composed(names, self._tokenizer)
        parser = self._classes[names]
        if parser is None:
            return None
        tools = request.tools if request else []
        new = parser(self._tokenizer, tools, chat_template_kwargs=dict(variables), model_config=self._model_config)
        for engine in filter(None, map(parser_engine, (new.tool_parser, new))):
            if engine.parser_engine_config.validate_tool_names:
                takes_any_name(engine)
        return new

    def _request(
        self,
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        choice: Literal["auto", "required"] = "auto",
    ) -> Any:
        """Build the request that vLLM's parsers expect: they read its tools, its tool choice and its variables."""
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        flat = [{"strict": None, **_simple(function["function"]), "type": "function"} for function in functions]
        request = ResponsesRequest(model="", input="", tools=flat)
        request.chat_template_kwargs = dict(variables)
        request.tool_choice = choice  # without tools, vLLM sets it to none, and calls would be read as text
        return request

    def _known(self, names: Names, parser: Parser) -> Traits:
        if names not in self._traits:
            self._traits[names] = _traits(parser, self._marks)
        return self._traits[names]


def _of_vllm(parser: NamedParser) -> str | None:
    return parser or None if isinstance(parser, str) else None


def _simple(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace property schemas that are not objects (such as ``true``) by ``{}``: parsers fail on them."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    if properties is None or (isinstance(properties, dict) and all(isinstance(p, dict) for p in properties.values())):
        return function
    items = properties.items() if isinstance(properties, dict) else ()
    described = {name: schema if isinstance(schema, dict) else {} for name, schema in items}
    return {**function, "parameters": {**parameters, "properties": described}}


def composed(names: Names, tokenizer: Any) -> type[Parser] | None:
    """Return vLLM's parser class that combines two parsers, or None without any.

    Raises `UnknownParser`, also if a parser does not fit the tokenizer.
    """
    from vllm.parser import ParserManager

    check_names(names)
    if names[1] == "openai":
        raise UnknownParser("The tool call parser openai reads nothing: a gpt-oss needs none here")
    try:
        parser: type[Parser] | None = ParserManager.get_parser(
            reasoning_parser_name=names[0], tool_parser_name=names[1], enable_auto_tools=True, tokenizer=tokenizer
        )
    except Exception as error:
        parser_names = " and ".join(filter(None, names))
        raise UnknownParser(f"The model cannot be read with {parser_names}: {error.__cause__ or error}") from error
    return parser


def check_names(names: Names) -> None:
    """Raise `UnknownParser` for a parser that vLLM does not have, nor a plug-in of the operator."""
    for kind, name, known in zip(("reasoning", "tool call"), names, registered(), strict=True):
        if name is not None and name not in known:
            raise UnknownParser(f"There is no {kind} parser {name!r}: there are {', '.join(sorted(known))}")


def registered() -> tuple[Collection[str], Collection[str]]:
    """Return the names of vLLM's reasoning parsers and tool call parsers, those of plug-ins among them."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return ReasoningParserManager.list_registered(), ToolParserManager.list_registered()


def _traits(parser: Parser, marks: frozenset[int]) -> Traits:
    parts = list(filter(None, (parser.reasoning_parser, parser.tool_parser)))
    letters = list(map(_first_letters, parts))
    known = [some for some in letters if some is not None]
    return Traits(
        marks=marks,
        triggers=frozenset().union(*known) if only_delegates(parser) and len(known) == len(letters) else None,
        takes_batches=parser.tool_parser is not None and parser.tool_parser.engine_based_streaming,
    )


def _first_letters(part: Any) -> frozenset[str] | None:
    """Return the first characters of the marks that end plain text or reasoning; None if unknown.

    vLLM's engine-based parsers declare their marks.
    """
    from vllm.parser.engine.parser_engine_config import ParserState

    engine = parser_engine(part)
    if engine is None:
        return None
    if changes_input(engine):
        return None
    config = engine.parser_engine_config
    if config.initial_state not in (ParserState.CONTENT, ParserState.REASONING):
        return None
    meaningful = {mark for state, mark in config.transitions if state in (ParserState.CONTENT, ParserState.REASONING)}
    spellings = (config.terminals.get(mark, ()) for mark in meaningful)
    literals = ([spelling] if isinstance(spelling, str) else spelling for spelling in spellings)
    return frozenset(literal[0] for some in literals for literal in some)
