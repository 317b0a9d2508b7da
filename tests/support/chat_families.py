"""Families of chat models: small vocabularies with their marks, the parsers of vLLM, grammars, and expected items.

A mark is a single token if the family has it as such, and text if the family writes it letter by letter.  The words
between marks are those of the tiny model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, Tokenizer

from penstock.pipeline.frames import CallSyntax, GenerationStarted, with_facts
from penstock.pipeline.protocol.tools import Toolset
from penstock.stages.models.chat.call_ids import CallId, id_of_client
from penstock.stages.models.chat.functions import functions
from penstock.stages.models.chat.load import ChatOptions, load_chat_model, read_config
from penstock.stages.models.chat.model import ChatMessage, ChatModel, Function, OutputParser, Rendered
from penstock.stages.models.chat.names import ToolNames
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.chat.grammar import grammar
from tests.support.harmony import conversation
from tests.support.paths import TINY_QWEN

WORDS = TINY_QWEN / "tokenizer.json"

THINK = ("<think>", "</think>")
CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
QWEN = ("<|im_start|>", *THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
DEEPSEEK_ENDS = ("<｜end▁of▁sentence｜>",)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *THINK)
DEEPSEEK_TOOLS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
)
GLM_ENDS = ("<|user|>", "<|observation|>", "<|endoftext|>")
GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *THINK),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", *THINK),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
MINIMAX = ("]~b]", "]~!b[", *THINK, "<minimax:tool_call>", "</minimax:tool_call>")
MISTRAL = ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[TOOL_CALLS]")
LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
GEMMA_ENDS = ("<turn|>", "<eos>")
GEMMA = ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
STEP3 = (
    *("<|EOT|>", *THINK, "<｜tool_sep｜>"),
    *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
)
SEED = ("<seed:bos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>")
ERNIE = ("<|end_of_sentence|>", *THINK, "<response>", "</response>", "<tool_call>", "</tool_call>")
LFM2 = ("<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>")

THINKING = {"thinking": True}


@dataclass(frozen=True)
class Family:
    """A family of chat models: its marks, its parsers, and the end of its prompts.

    ``ends`` are the marks that end a turn, ``marks`` all other special tokens.  ``reasoning`` and ``tools`` name vLLM's
    parsers.  ``prompt`` is the end of a rendered prompt, and ``variables`` are the template variables that the parsers
    read as well.
    """

    ends: tuple[str, ...]
    marks: tuple[str, ...]
    reasoning: str | None = None
    tools: str | None = None
    prompt: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "deepseek_r1": Family(DEEPSEEK_ENDS, (*DEEPSEEK, *DEEPSEEK_TOOLS), "deepseek_r1", "deepseek_v3", "<think>\n"),
    "deepseek_v31": Family(
        DEEPSEEK_ENDS, (*DEEPSEEK, *DEEPSEEK_TOOLS), "deepseek_v3", "deepseek_v31", "<think>", THINKING
    ),
    "deepseek_v4": Family(DEEPSEEK_ENDS, DEEPSEEK, "deepseek_v4", "deepseek_v4", "<think>", THINKING),
    "ernie45": Family(("</s>",), ERNIE, "ernie45", "ernie45", "<think>\n"),
    "gemma4": Family(GEMMA_ENDS, GEMMA, "gemma4", "gemma4", variables={"enable_thinking": True}),
    "glm45": Family(GLM_ENDS, GLM, "glm45", "glm45"),
    "granite": Family(("<|end_of_text|>",), GRANITE, tools="granite"),
    "kimi_k2": Family(("<|im_end|>", "[EOS]"), KIMI, "kimi_k2", "kimi_k2", "<think>"),
    "lfm2": Family(("<|im_end|>",), LFM2, tools="lfm2"),
    "llama3": Family(LLAMA_ENDS, LLAMA, tools="llama3_json"),
    "minimax_m2": Family(("[e~[",), MINIMAX, "minimax_m2", "minimax_m2", "<think>\n"),
    "mistral": Family(("</s>",), (*MISTRAL, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"), "mistral", "mistral"),
    "mistral_old": Family(("</s>",), MISTRAL, tools="mistral"),
    "nemotron": Family(CHATML_ENDS, QWEN, "nemotron_v3", "qwen3_coder", "<think>\n"),
    "qwen3": Family(CHATML_ENDS, QWEN, "qwen3", "hermes"),
    "qwen3_coder": Family(CHATML_ENDS, QWEN, "qwen3", "qwen3_coder", "<think>\n"),
    "seed_oss": Family(("<seed:eos>",), SEED, "seed_oss", "seed_oss"),
    "step3": Family(DEEPSEEK_ENDS, STEP3, "step3", "step3", "<think>\n"),
    "step3p5": Family(CHATML_ENDS, QWEN, "step3p5", "step3p5", "<think>\n"),
    "tiny_qwen": Family(CHATML_ENDS, QWEN, "qwen3", "hermes"),
}


@dataclass(frozen=True)
class EndingTemplate:
    """A template with only an end: the marks before the turn of the model."""

    text: str

    def render(self, messages: Sequence[ChatMessage], functions: Sequence[Function], *_: Any, **__: Any) -> Rendered:
        """Render the latest text, the names of the functions, and the end."""
        names = [function["function"]["name"] for function in functions]
        return Rendered(f"{messages[-1]['content']}\n{', '.join(names)}\n{self.text}")


@cache
def family_model(name: str) -> ChatModel:
    """The model of a family; the tiny Qwen is loaded with its own template, as a server loads it."""
    if name == TINY_QWEN.name:
        return load_chat_model(read_config(str(TINY_QWEN)), ChatOptions())
    family = FAMILIES[name]
    vocabulary = Vocabulary(tokenizer_with((*family.ends, *family.marks)))
    return ChatModel(
        vocabulary=vocabulary,
        template=EndingTemplate(family.prompt),
        parsers=NamedParsers(vocabulary.tokenizer, family.reasoning, family.tools),
        stop_token_ids=tuple(vocabulary.marks[end] for end in family.ends),
        variables=family.variables,
    )


def tokenizer_with(marks: Sequence[str]) -> Any:
    """A tokenizer with the tiny model's words, and with ``marks`` in place of the model's own marks."""
    layout = json.loads(WORDS.read_text())
    old = {mark["content"] for mark in layout.pop("added_tokens")}
    words = {f"<unused {at}>" if word in old else word: at for word, at in layout["model"]["vocab"].items()}
    layout["model"]["vocab"] = words
    tokenizer = Tokenizer.from_str(json.dumps(layout | {"added_tokens": []}))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return fast_tokenizer(tokenizer_object=tokenizer, eos_token=marks[0])


@cache
def load_model(folder: Path = TINY_QWEN, **options: Any) -> ChatModel:
    """Load a model as a server does, with these `ChatOptions`; the first call imports vLLM, which takes ten seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn
        return load_chat_model(_config(folder), ChatOptions(**options))


@cache
def _config(folder: Path) -> Any:
    return read_config(str(folder))


TURN_END = "<|im_end|>"
USER_TURN = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
THINKING_OFF = f"{USER_TURN}<think>\n\n</think>\n\n"
THOUGHT_OPEN = f"{USER_TURN}<think>\n"


@dataclass(frozen=True)
class UnknownCallSyntax:
    thinking: tuple[str, str] | None = ("<think>", "</think>")
    call_id: CallId = id_of_client

    def start(self, turn: GenerationStarted, functions: Sequence[Function]) -> OutputParser:
        raise NotImplementedError

    def calls(self, functions: Sequence[Function], *, parallel: bool) -> dict[str, Any] | None:
        """Return None: the markup is unknown."""


def model_of_unknown_syntax(thinking: tuple[str, str] | None = ("<think>", "</think>")) -> ChatModel:
    return replace(load_model(), parsers=UnknownCallSyntax(thinking))


@dataclass(frozen=True)
class ChatGrammar:
    chat: ChatModel
    rules: str | None
    calls: CallSyntax

    def accepted(self, turn: str) -> str:
        """The part of ``turn`` that the grammar accepts; ``...`` follows if the turn must go on."""
        assert self.rules is not None
        return accepted_text(self.chat, self.rules, turn)


def chat_grammar(
    tools: Toolset | None = None,
    text_format: Mapping[str, Any] | None = None,
    structured: Mapping[str, Any] | None = None,
    *,
    prompt: str = USER_TURN,
    chat: ChatModel | None = None,
    continues: bool = False,
    thinks: bool = False,
) -> ChatGrammar:
    chat, tools = chat or load_model(), tools or Toolset()
    request = with_facts(conversation(tools=tools, text_format=text_format), structured=structured or {})
    shown = functions(tools, ToolNames(tools))
    prompt_ids = tuple(chat.vocabulary.encode(prompt))
    return ChatGrammar(chat, *grammar(chat, request, shown, prompt_ids, continues=continues, thinks=thinks))


def accepted_text(chat: ChatModel, rules: str, turn: str) -> str:
    started = LLMatcher(grammar_tokenizer(chat.vocabulary.tokenizer), grammar_from("grammar", rules), log_level=0)
    assert not started.is_error(), started.get_error()
    token_ids, count = chat.vocabulary.encode(turn), 0
    while count < len(token_ids) and started.consume_token(token_ids[count]):
        count += 1
    return chat.vocabulary.decode(token_ids[:count]) + (
        "" if started.is_stopped() and not started.is_error() else "..."
    )


@cache
def grammar_tokenizer(of: Any) -> LLTokenizer:
    import llguidance.hf  # noqa: PLC0415 - imports transformers, which takes seconds

    return llguidance.hf.from_tokenizer(of)


ItemKind: TypeAlias = Literal["thought", "message", "call"]


@dataclass(frozen=True)
class ExpectedItem:
    """An item: its text, or the arguments of a call, and whether it is complete."""

    kind: ItemKind
    text: str
    name: str = ""
    complete: bool = True

    def matches(self, other: ExpectedItem) -> bool:
        """Return True if both are equal; spacing in complete JSON arguments does not count."""
        return self._content() == other._content()

    def _content(self) -> object:
        whole = self.kind == "call" and self.complete and _is_json(self.text)
        return self.kind, self.name, self.complete, json.loads(self.text) if whole else self.text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def thought(text: str = "The user wants the weather.") -> ExpectedItem:
    return ExpectedItem("thought", text)


def message(text: str) -> ExpectedItem:
    return ExpectedItem("message", text)


def weather_call(arguments: str) -> ExpectedItem:
    return ExpectedItem("call", arguments, "get_weather")


def cut_item(items: ExpectedItem) -> ExpectedItem:
    return ExpectedItem(items.kind, items.text, items.name, complete=False)


THOUGHT = thought()
PARIS_CALL = weather_call('{"city": "Paris"}')
THREE_DAYS_CALL = weather_call('{"city": "Paris", "days": 3}')
AFTERWARDS = message("I have asked.")

NESTED_ARGUMENTS = (
    '{"query": "say \\"hi\\" if a < b & 1 > 0", '
    '"filter": {"names": ["Zoë", "日本 🧑\u200d🚀"], "limit": 3, "exact": true}}'
)

ITEMS_BY_CASE: Mapping[str, tuple[ExpectedItem, ...]] = {
    "text": (message("Paris is warm."),),
    "thought_and_text": (THOUGHT, message("Paris is warm.")),
    "cut_in_thought": (cut_item(thought("The user wants the")),),
    "call": (THOUGHT, PARIS_CALL),
    "two_calls": (THOUGHT, THREE_DAYS_CALL, weather_call('{"city": "Rome", "days": 5}')),
    "text_and_call": (THOUGHT, message("I look it up."), PARIS_CALL),
    "cut_in_second_call": (THOUGHT, THREE_DAYS_CALL, cut_item(weather_call('{"city": "Ro'))),
    "cut_in_name": (THOUGHT,),
    "nested_arguments": (THOUGHT, ExpectedItem("call", NESTED_ARGUMENTS, "search")),
    "no_arguments": (THOUGHT, ExpectedItem("call", "{}", "get_time")),
    "text_after_call": (THOUGHT, PARIS_CALL, AFTERWARDS),
    "half_a_mark": (message("Write <tool"),),
    "mark_in_text": (message("Write <function=name> and close it."),),
    "mark_as_text": (PARIS_CALL,),
    "call_in_thought": (THOUGHT, PARIS_CALL),
    "text_between_calls": (THOUGHT, PARIS_CALL, message("Now the other one."), weather_call('{"city": "Rome"}')),
    "call_without_name": (THOUGHT, message('<tool_call>\n{"function": "get_weather", "city": "Paris"}\n</tool_call>')),
    "broken_arguments": (THOUGHT, cut_item(weather_call('{"city": Paris}'))),
    "undeclared_tool": (THOUGHT, thought('{"city": "Paris"}')),
    "call_unasked": (THOUGHT, thought('{"city": "Paris"}')),
    "python_tag": (PARIS_CALL,),
    "json_answer": (message('{"city": "Paris"}'),),
}
"""Items by case.  `expected_items` drops the thoughts for families without reasoning."""

TINY_QWEN_ITEMS: Mapping[str, tuple[ExpectedItem, ...]] = {
    "greeting": (thought("The user wants a greeting."), message("Hello!")),
    "earlier_turn": (thought("It was seven."), message("Seven.")),
    "thinking_off": (message("I look it up."), PARIS_CALL),
    "call_result": (thought("The tool answered."), message("It is 18 °C in Paris.")),
    "custom_tool_call": (
        thought("A query will tell."),
        ExpectedItem("call", 'SELECT count(*)\nFROM users  -- "all" 日本', "run_sql"),
    ),
    "custom_tool_call_cut": (
        thought("A query will tell."),
        cut_item(ExpectedItem("call", "SELECT count(*)\nFR", "run_sql")),
    ),
    "call_in_namespace": (
        thought("The manual knows."),
        ExpectedItem("call", '{"question": "What is a stage?"}', "ask"),
    ),
    "choice_of_one_function": (THOUGHT, PARIS_CALL),
    "json_schema": (thought("JSON is wanted."), message('{"name": "Ada", "age": 36}')),
    "stop_text": (thought("I count up."), message("One, two, ")),
}
"""Items of the tiny Qwen's cases, whose requests use more options."""

ITEMS_BY_FOLDER: Mapping[str, tuple[ExpectedItem, ...]] = {
    "qwen3_coder_half_a_mark": (message("Write <function"),),
    "llama3_half_a_mark": (message("Write <|python"),),
}
"""Items by folder, for cases that differ from `ITEMS_BY_CASE`."""


def expected_items(folder: str) -> tuple[ExpectedItem, ...]:
    family = family_of(folder)
    case = folder.removeprefix(f"{family}_")
    if family == TINY_QWEN.name:
        return TINY_QWEN_ITEMS[case]
    items = ITEMS_BY_FOLDER[folder] if folder in ITEMS_BY_FOLDER else ITEMS_BY_CASE[case]
    return items if FAMILIES[family].reasoning else tuple(item for item in items if item.kind != "thought")


def family_of(folder: str) -> str:
    return max((family for family in FAMILIES if folder.startswith(f"{family}_")), key=len)


def fast_tokenizer(**options: Any) -> Any:
    """Make a tokenizer of transformers; importing transformers takes seconds and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    return PreTrainedTokenizerFast(**options)
