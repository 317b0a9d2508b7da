"""One call in the markup of each tool call parser of vLLM, and the marks that are single tokens in its models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import NamedParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support.chat_families import (
    DEEPSEEK,
    DEEPSEEK_TOOLS,
    GLM,
    KIMI,
    LFM2,
    LLAMA,
    MINIMAX,
    MISTRAL,
    QWEN,
    SEED,
    STEP3,
    THINK,
    EndingTemplate,
    tokenizer_with,
)

CITY = "@"
"""The place of the argument ``city`` in a markup."""

END = "<|end|>"

_JSON = '{"name": "get_weather", "arguments": {"city": "@"}}'
_TOOL_CALL = f"<tool_call>\n{_JSON}\n</tool_call>"
_TAGS = "<tool_call>\n<function=get_weather>\n<parameter=city>\n@\n</parameter>\n</function>\n</tool_call>"
_KEYS = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>@</arg_value>\n</tool_call>"
_PYTHON = '[get_weather(city="@")]'
_HY = "<tool_calls><tool_call>get_weather{}<arg_key>city</arg_key><arg_value>@</arg_value></tool_call></tool_calls>"
_PLAMO = "<|plamo:begin_tool_{0}:plamo|>{1}<|plamo:end_tool_{0}:plamo|>"


def _dsml(outer: str, gap: str = "", name: str = "DSML") -> str:
    """A call of DeepSeek since V3.2; ``gap`` stands after the marks."""
    begin, end = f"<｜{name}｜{gap}", f"</｜{name}｜{gap}"
    parameter = f'{begin}parameter name="city" string="true">@{end}parameter>'
    invoke = f'{begin}invoke name="get_weather">\n{parameter}\n{end}invoke>'
    return f"{begin}{outer}>\n{invoke}\n{end}{outer}>"


CALL_MARKUP: Mapping[str, str] = {
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "@"}}]<|tools_suffix|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "@"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "@"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": '<dots_function_call><invoke name="get_weather"><parameter name="city">@</parameter></invoke>'
    "</dots_function_call>",
    "ernie45": _TOOL_CALL,
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>@<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>@<|"|>}<tool_call|>',
    "gigachat3": f"<|function_call|>{_JSON}",
    "glm45": _KEYS,
    "glm47": _KEYS,
    "granite": f"<|tool_call|>[{_JSON}]",
    "granite-20b-fc": f"<function_call> {_JSON}",
    "granite4": _TOOL_CALL,
    "hermes": _TOOL_CALL,
    "hunyuan_a13b": f"<tool_calls>[{_JSON}]</tool_calls>",
    "hy_v3": _HY.format("<tool_sep>"),
    "hy_v4": _HY.format(""),
    "inkling": '<|message_model|><|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "@"}}'
    "<|end_message|>",
    "internlm": '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "@"}}<|action_end|>',
    "jamba": f"<tool_calls>[{_JSON}]</tool_calls>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
    "<ifm|arg_value>@</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "@"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>@<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "ling3": _KEYS,
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "@"}}',
    "llama4_json": '{"name": "get_weather", "parameters": {"city": "@"}}',
    "llama4_pythonic": f"<|python_start|>{_PYTHON}<|python_end|>",
    "longcat": f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>",
    "mimo": "<tool_call><function=get_weather><parameter=city>@</parameter></function></tool_call>",
    "minicpm5": '<function name="get_weather"><param name="city">@</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">@</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>@'
    "]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "@"}',
    "muse_glimmer": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">@</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
    "olmo3": '<function_calls>get_weather(city="@")</function_calls>',
    "phi4_mini_json": f"functools[{_JSON}]",
    "plamo3": _PLAMO.format(
        "requests",
        _PLAMO.format(
            "request",
            _PLAMO.format("name", "get_weather")
            + _PLAMO.format("arguments", '<|plamo:constrain|>json<|plamo:msg|>{"city": "@"}'),
        ),
    ),
    "poolside_v1": _KEYS,
    "pythonic": _PYTHON,
    "qwen3_coder": _TAGS,
    "qwen3_json": _TOOL_CALL,
    "qwen3_xml": _TAGS,
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>@</parameter>\n</function>\n"
    "</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="get_weather"><steptml:parameter name="city">@</steptml:parameter></steptml:invoke>'
    "<｜tool_call_end｜><｜tool_calls_end｜>",
    "step3p5": _TAGS,
    "xlam": f"[{_JSON}]",
}
"""A call of ``get_weather`` for each parser of calls, by its name in vLLM."""

_COHERE = (
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "@"}}]<|END_ACTION|>'
)

OWN_MARKUP: Mapping[str, str] = {
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "gigachat35": _dsml("tool_calls", name="GCML"),
    "interns1": '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "@"}}<|action_end|>',
    "iquest_q1": _KEYS.replace("tool_call", "iquest_tool_call"),
    "nanbeige": _TAGS,
    "solar_open2": "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>@<|tool_arg:end|>\n"
    "<|tool_call:end|>",
    "spark25": _KEYS,
    "trinity": _TOOL_CALL,
    "functionary": '<function=get_weather>{"city": "@"}</function>',
    "functionary_v32": '>>>get_weather\n{"city": "@"}',
    "nemotron_nano_v2": f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
    "step5": _TAGS,
}
"""The same for parsers that vLLM does not have, or that do not start here."""

WITHOUT_MARKUP: Mapping[str, str] = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "hf": "reads by a template in the tokenizer of the model",
    "openai": "is refused: gpt-oss needs none",
}
"""The other parsers of calls, each with the reason why it has no markup here."""

_DEEPSEEK = (*DEEPSEEK, *DEEPSEEK_TOOLS)
_HY_MARKS = ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>", *GLM[-4:], *THINK)
_MARKS: Mapping[str, tuple[str, ...]] = {
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), ("<|START_ACTION|>", "<|END_ACTION|>")),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41"), _DEEPSEEK),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "gigachat3": ("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    **dict.fromkeys(("glm45", "glm47", "ling3", "poolside_v1"), GLM),
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    **dict.fromkeys(("hy_v3", "hy_v4"), _HY_MARKS),
    "inkling": (
        *("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"),
        *("<|content_invoke_tool_text|>", "<|content_tool_error|>", "<|content_model_end_sampling|>"),
        *("<|end_message|>", "<|message_user|>", "<|message_system|>", "<|message_tool|>"),
    ),
    **dict.fromkeys(("interns1", "internlm"), ("<|action_start|>", "<|action_end|>", "<|plugin|>")),
    "iquest_q1": ("<iquest_tool_call>", "</iquest_tool_call>"),
    **dict.fromkeys(("jamba", "hunyuan_a13b"), ("<tool_calls>", "</tool_calls>")),
    "kimi_k2": KIMI,
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "lfm2": LFM2,
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": MINIMAX,
    "minimax_m3": ("]<]minimax[>[", *MINIMAX),
    "mistral": (*MISTRAL, "[ARGS]", "[CALL_ID]"),
    "muse_glimmer": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "plamo3": tuple(
        f"<|plamo:{mark}:plamo|>"
        for part in ("tool_requests", "tool_request", "tool_name", "tool_arguments", "think")
        for mark in (f"begin_{part}", f"end_{part}")
    ),
    "seed_oss": SEED,
    "solar_open2": tuple(
        f"<|{mark}|>"
        for mark in ("tool_call:start", "tool_call:end", "tool_arg:start", "tool_arg:value", "tool_arg:end")
    ),
    "step3": STEP3,
}
"""The marks that are single tokens, if they are not those of Qwen."""


@cache
def marked_model(parser: str) -> ChatModel:
    """A model without reasoning whose calls are read by ``parser``."""
    vocabulary = Vocabulary(tokenizer_with((END, *_MARKS.get(parser, QWEN))))
    parsers = NamedParsers(vocabulary.tokenizer, None, parser)
    return ChatModel(vocabulary, EndingTemplate(""), parsers, (vocabulary.marks[END],), {})
