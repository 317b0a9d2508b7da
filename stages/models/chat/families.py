"""Guess the names of the parsers that read a model's output, for operators who name none.

A chat template shows how its model writes, because it lays out earlier turns with the same marks.  If several families
share their marks, or a model has no template in text form, the model type decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.stages.models.chat.forms import CALL_FORMS, THOUGHT_FORMS
from penstock.stages.models.chat.suffixes import texts


@dataclass(frozen=True)
class Sign:
    """Evidence for a parser: the template contains all ``marks``, and the model type begins with one of ``types``.

    A template with one of the marks ``without`` is another family's.  With ``opens_thought``, the end of the prompts
    that the template makes may also open a thought.
    """

    parser: str
    marks: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    opens_thought: bool = False
    without: tuple[str, ...] = ()

    def fits(self, template: str, model_type: str) -> bool:
        """True if a model with this template and ``model_type`` matches."""
        return (
            all(mark in template for mark in self.marks)
            and not any(mark in template for mark in self.without)
            and (not self.types or model_type.startswith(self.types))
            and (not self.opens_thought or _may_open_thought(template))
        )


_OPENED = re.compile(r"<think>(?!(?:\\n|\s)*</think>)")


def _may_open_thought(template: str) -> bool:
    """True if the end of a prompt may have ``<think>``: a prompt without it then opens no thought."""
    return _OPENED.search(template.rpartition("add_generation_prompt")[2]) is not None


@dataclass(frozen=True)
class Guess:
    """A guessed parser and the reason for it; ``parser`` is None if no sign fits.

    ``doubt`` says what else about the model speaks for another parser, or for one at all; empty if nothing does.
    """

    parser: str | None
    why: str
    doubt: str = ""


TOOL_CALLS = (
    # Families with their own parser, tried before the generic parser of the marks that they share.
    Sign("deepseek_v41", types=("deepseek_v41",)),
    Sign("deepseek_v4", types=("deepseek_v4",)),
    Sign("deepseek_v32", types=("deepseek_v32",)),
    Sign("inkling", types=("inkling",)),
    Sign("kimi_k3", types=("kimi_k3",)),
    Sign("beam", types=("beam",)),
    Sign("mimo", ("<function=", "<parameter="), ("mimo",)),
    Sign("step3p5", ("<function=", "<parameter="), ("step3p5", "step3p7")),
    Sign("step5", ("<function=", "<parameter="), ("step5",)),
    Sign("qwen3_coder", ("<function=", "<parameter="), ("granite",)),
    Sign("hy_v4", ("<arg_key",), ("hy_v4",)),
    Sign("hy_v3", ("<arg_key",), ("hy_v3",)),
    Sign("ling3", ("<arg_key>",), ("bailing",)),
    Sign("poolside_v1", ("<arg_key>",), ("laguna",)),
    Sign("spark25", ("<arg_key>",), ("spark",)),
    Sign("nanbeige", ("<function=", "<parameter="), ("nanbeige",)),
    Sign("trinity", ("<tool_call>",), ("afmoe", "trinity")),
    Sign("ernie45", ("<tool_call>",), ("ernie4_5",)),
    Sign("hermes", ("<tool_call>",), ("bailing", "mimo")),
    Sign("jamba", ("<tool_calls>",), ("jamba",)),
    Sign("hunyuan_a13b", ("<tool_calls>",), ("hunyuan",)),
    Sign("hunyuan_a13b", ('<tool_calls>[{"name": "func_name1"',)),
    Sign("jamba", ("<tool_calls>", '"arguments"')),
    Sign("nemotron_nano_v2", ("<TOOLCALL>[",)),
    # Marks that only one family has.
    Sign("seed_oss", ("<seed:tool_call>",)),
    Sign("minimax_m3", ("]<]minimax[>[",)),
    Sign("minimax_m2", ("<minimax:tool_call>",)),
    Sign("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Sign("k2_horizon", ("<ifm|tool_call>",)),
    Sign("iquest_q1", ("<iquest_tool_call>",)),
    Sign("solar_open2", ("<|tool_arg:start|>",)),
    Sign("plamo3", ("<|plamo:begin_tool_request",)),
    Sign("muse", ("<atem:function_calls>",), ("muse_spark", "musespark")),
    Sign("muse_glimmer", ("<atem:function_calls>",)),
    Sign("longcat", ("<longcat_tool_call>",)),
    Sign("dots", ("<dots_function_call>",)),
    Sign("functiongemma", ("<start_function_call>",)),
    Sign("gemma4", ("<|tool_call>",)),
    Sign("apertus", ("<|tools_prefix|>",)),
    Sign("lfm2", ("<|tool_call_start|>",)),
    Sign("lfm2", ("<|tool_list_start|>",)),
    Sign("lfm2", ("List of tools: [",), ("lfm2",)),
    Sign("step3", ("<steptml:",)),
    Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    Sign("mistral", ("[TOOL_CALLS]",)),
    Sign("interns1", ("<|action_start|>",), ("interns1",)),
    Sign("internlm", ("<|action_start|>",)),
    Sign("cohere_command4", ("<|START_ACTION|>",), ("cohere2_moe",)),
    Sign("cohere_command3", ("<|START_ACTION|>",)),
    Sign("gigachat35", ("｜GCML｜",)),
    Sign("gigachat3", ("<|role_sep|>", "function call"), without=("｜GCML｜",)),
    Sign("functionary_v32", (">>>all",)),
    Sign("functionary", ("<|python_tag|>", "<function=")),
    Sign("llama3_json", ("<|python_tag|>",)),
    Sign("llama4_json", ('"parameters": dictionary of argument name',), ("llama4",)),
    Sign("llama3_json", ('"parameters": dictionary of argument name',)),
    Sign("phi4_mini_json", ("<|tool|>",), ("phi",)),
    Sign("phi4_mini_json", ("functools[",)),
    Sign("llama4_pythonic", ("[func_name1(param1=value1",), ("llama4",)),
    Sign("llama4_pythonic", ("[func_name1(param1=value1",)),
    Sign("pythonic", ("[func_name1(params_name1=params_value1",)),
    Sign("xlam", ('[{"name": "tool_call_name", "arguments"',)),
    # Marks that many families share: the marks inside them, or the model type, decide.
    Sign("glm45", ("<arg_key>",), without=("<iquest_tool_call>",)),
    Sign("qwen3_coder", ("<function=", "<parameter=")),
    Sign("minicpm5", ("<function name=", "<param name=")),
    Sign("olmo3", ("<function_calls>",), ("olmo",)),
    Sign("granite", ("<|tool_call|>",)),
    Sign("granite4", ("</tool_call>",), ("granite",)),
    Sign("granite", ("<tool_call>",), ("granite",)),
    Sign("granite-20b-fc", ("<function_call>",), ("gpt_bigcode", "granite")),
    Sign("granite-20b-fc", ("<function_call>", "<|function_call_library|>")),
    Sign("hermes", ("<tool_call>",)),
    Sign("mistral", types=("mistral", "mixtral", "ministral", "pixtral")),
)

REASONING = (
    Sign("deepseek_v41", types=("deepseek_v41",)),
    Sign("deepseek_v4", types=("deepseek_v4",)),
    Sign("deepseek_v3", types=("deepseek_v32",)),
    Sign("inkling", types=("inkling",)),
    Sign("kimi_k3", types=("kimi_k3",)),
    Sign("beam", types=("beam",)),
    Sign("seed_oss", ("<seed:think>",)),
    Sign("solar_open2", ("<|think:start|>",)),
    Sign("iquest_q1", ("<iquest_tool_call>", "</think>")),
    Sign("gemma4", ("<|channel>",)),
    Sign("apertus", ("<|inner_prefix|>",)),
    Sign("mistral", ("[THINK]",)),
    Sign("cohere_command4", ("<|START_THINKING|>",), ("cohere2_moe",)),
    Sign("cohere_command3", ("<|START_THINKING|>",)),
    Sign("plamo3", ("<|plamo:begin_think",)),
    Sign("k2_horizon", ("<ifm|",)),
    Sign("muse", ("<atem:function_calls>", "to=self"), ("muse_spark", "musespark")),
    Sign("muse_glimmer", ("<atem:function_calls>", "to=self")),
    Sign("apriel", ("[BEGIN FINAL RESPONSE]",)),
    Sign("think", ("</think>",), ("lfm2",)),
    Sign("granite3", ("<think></think>",), ("granite",)),
    Sign("granite", ("Here is my thought process",), ("granite",)),
    Sign("granite", ("Here is my thought process",)),
    Sign("mimo", ("</think>",), ("mimo",)),
    Sign("step3p5", ("</think>",), ("step3p5", "step3p7")),
    Sign("step5", ("</think>",), ("step5",)),
    Sign("step3", ("<steptml:",)),
    Sign("hy_v4", ("<arg_key",), ("hy_v4",)),
    Sign("hy_v3", ("<arg_key",), ("hy_v3",)),
    Sign("hunyuan_a13b", ("<think>",), ("hunyuan",)),
    Sign("hunyuan_a13b", ("<think>", '<tool_calls>[{"name": "func_name1"')),
    Sign("ling3", ("</think>",), ("bailing",)),
    Sign("poolside_v1", ("</think>",), ("laguna",)),
    Sign("ernie45", ("</think>",), ("ernie4_5",)),
    Sign("olmo3", ("</think>",), ("olmo",)),
    Sign("olmo3", ("<think>",), ("olmo",)),
    Sign("granite_thinking_parser", ("</think>", "<function="), ("granite",)),
    Sign("nemotron_v3", ("</think>",), ("nemotron",)),
    Sign("minimax_m3", ("</think>",), ("minimax_m3",)),
    Sign("minimax_m3", ("<mm:think>",)),
    Sign("minimax_m2", ("</think>",), ("minimax",)),
    Sign("minicpmv", ("</think>",), ("minicpmv",)),
    Sign("kimi_k2", ("</think>", "<|tool_calls_section_begin|>")),
    Sign("glm45", ("</think>",), ("glm",)),
    # V3.1 thinks if the request sets this template variable; R1 and its kin always think, V3 never does.
    Sign("deepseek_v3", ("<｜", "</think>", " thinking is defined")),
    Sign("deepseek_r1", ("<｜Assistant｜>", "<think>", "</think>")),
    Sign("think", ("<think>", "</think>"), opens_thought=True),
    Sign("qwen3", ("<think>", "</think>")),
    Sign("mistral", types=("ministral",)),
)


def guess(signs: tuple[Sign, ...], templates: Sequence[str], model_type: str) -> Guess:
    """Return the parser of the first sign that fits one of ``templates``, which are tried in order.

    The operator's template comes before the model's own, which may show more: the template for calls that vLLM has for
    DeepSeek R1 leaves out its reasoning.  Among signs, specific ones come before generic ones.
    """
    fitting = (next((sign for sign in signs if sign.fits(each, model_type)), None) for each in templates)
    found = [sign for sign in fitting if sign]
    if not found:
        return Guess(None, "nothing in its template shows which one it needs", _unread(signs, templates))
    first, *others = found
    marked = [f"its template has {' and '.join(first.marks)}"] if first.marks else []
    typed = [f"it is a {model_type} model"] if first.types else []
    doubt = _doubt(first, others, signs, model_type) or _unknown_marks(first.parser, templates[0], signs)
    return Guess(first.parser, " and ".join(marked + typed), doubt)


_MARK_OF_CALLS = re.compile(
    r"<[^<>\s'\"{}=]*(?:tool_?call|function_?call|tool_arg|arg_key|arg_value|invoke)[^<>\s'\"{}=]*>?"
)
_MARK_OF_THOUGHTS = re.compile(r"<([^<>\s'\"{}=/]*think(?!ing)[^<>\s'\"{}=]*>)(?=.*</\1)", re.DOTALL)
_OF_PROMPTS = re.compile(r"response|result|output|library|_id\b")
"""The words in marks that a template alone writes."""


def _unknown_marks(parser: str, template: str, signs: tuple[Sign, ...]) -> str:
    """Return what a template shows that looks like a mark, and that the parser's description does not have."""
    forms, pattern = (CALL_FORMS, _MARK_OF_CALLS) if signs == TOOL_CALLS else (THOUGHT_FORMS, _MARK_OF_THOUGHTS)
    known = "\0".join(texts(forms.get(parser)))
    found = dict.fromkeys(each[0] for each in pattern.finditer(template)) if parser in forms else {}
    unknown = [mark for mark in found if mark not in known and not _OF_PROMPTS.search(mark)]
    return f"its template also shows {unknown[0]}, which {parser} does not read" if unknown else ""


_TOOLS = re.compile(r"\btool(?:s|_calls)\b")


def _unread(signs: tuple[Sign, ...], templates: Sequence[str]) -> str:
    """Return what a template without a sign shows nevertheless."""
    if signs == TOOL_CALLS and any(map(_TOOLS.search, templates)):
        return "its template has tools, but shows no known way to call them"
    return ""


def _doubt(chosen: Sign, others: Sequence[Sign], signs: tuple[Sign, ...], model_type: str) -> str:
    """Return what speaks against ``chosen``: ``others``, the signs of the model's own template, or its type."""
    for other in others:
        if other.parser != chosen.parser:
            return f"the model's own template shows {other.parser}"
    usual = list(dict.fromkeys(sign.parser for sign in signs if sign.types and model_type.startswith(sign.types)))
    if usual and not chosen.types and chosen.parser not in usual:
        return f"a {model_type} model usually needs {' or '.join(usual)}"
    return ""
