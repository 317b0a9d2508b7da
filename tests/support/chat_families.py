"""Families of chat models, small: one vocabulary with the marks of each, and the parsers that vLLM has for it.

What they are built of is as it is served: the marks are single tokens where the family has them as such, and text where
it writes them letter by letter.  The words between them are those of the tiny model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from stages.chat.load import ChatOptions, load_chat_model, read_config
from stages.chat.model import ChatMessage, ChatModel, Function, Rendered
from stages.chat.parsers import VllmParsers
from stages.chat.vocabulary import Vocabulary
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

THINKS = {"thinking": True}


@dataclass(frozen=True)
class Family:
    """``ends`` are the marks that end a turn, ``marks`` all other tokens that stand for themselves.

    ``reasoning`` and ``tools`` name vLLM's parsers, ``prompt`` is what its template ends with, and ``variables`` are
    those of the template that its parsers want to know as well.
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
        DEEPSEEK_ENDS, (*DEEPSEEK, *DEEPSEEK_TOOLS), "deepseek_v3", "deepseek_v31", "<think>", THINKS
    ),
    "deepseek_v4": Family(DEEPSEEK_ENDS, DEEPSEEK, "deepseek_v4", "deepseek_v4", "<think>", THINKS),
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
class Ending:
    """A template of which nothing is there but its end: the marks that a model finds itself behind."""

    text: str

    def render(
        self,
        messages: Sequence[ChatMessage],
        functions: Sequence[Function],
        variables: Mapping[str, Any],
        *,
        source: str | None = None,
        continues: bool = False,
    ) -> Rendered:
        """The latest text, the names of the functions, and the end."""
        names = [function["function"]["name"] for function in functions]
        return Rendered(f"{messages[-1]['content']}\n{', '.join(names)}\n{self.text}")


@cache
def chat_model(name: str) -> ChatModel:
    """The model of a family; that of the tiny model is loaded as it is served, template and all."""
    if name == TINY_QWEN.name:
        return load_chat_model(read_config(str(TINY_QWEN)), ChatOptions())
    family = FAMILIES[name]
    vocabulary = Vocabulary(tokenizer_of((*family.ends, *family.marks)))
    return ChatModel(
        vocabulary=vocabulary,
        template=Ending(family.prompt),
        parsers=VllmParsers(vocabulary.tokenizer, family.reasoning, family.tools),
        stop_token_ids=tuple(vocabulary.marks[end] for end in family.ends),
        variables=family.variables,
    )


def tokenizer_of(marks: Sequence[str]) -> Any:
    """The tiny model's words, and ``marks`` in place of its own."""
    from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - takes seconds, and one module of tests needs it
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    layout = json.loads(WORDS.read_text())
    old = {mark["content"] for mark in layout.pop("added_tokens")}
    words = {f"<unused {at}>" if word in old else word: at for word, at in layout["model"]["vocab"].items()}
    layout["model"]["vocab"] = words
    tokenizer = Tokenizer.from_str(json.dumps(layout | {"added_tokens": []}))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=marks[0])
