"""The families of chat models, as data: how each writes its thoughts and its calls.

The names are those of vLLM's parsers.  A name that is not here is read by vLLM's parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.stages.models.chat.call_ids import function_and_index, index_alone, nine_characters
from penstock.stages.models.chat.call_readers import undoubled_name
from penstock.stages.models.chat.json_calls import HeadedCall, JsonCall, kimi_name
from penstock.stages.models.chat.keyed_calls import KeyedCall
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.messages import MessageForm
from penstock.stages.models.chat.python_call import PythonCall
from penstock.stages.models.chat.tagged_calls import Tag, TaggedCall
from penstock.stages.models.chat.thoughts import ThoughtForm
from penstock.stages.models.chat.written_calls import WrittenCalls, json_objects

_JSON = JsonCall()
_TOOL_CALL = ("<tool_call>",)
_TOOL_CALL_END = ("</tool_call>",)

_FUNCTION = TaggedCall(Tag("<function="), Tag("<parameter="), "</parameter>", "</function>", trims_lines=True)
_INVOKE = TaggedCall(Tag("<invoke ", name_in="name"), Tag("<parameter ", name_in="name"), "</parameter>", "</invoke>")
_KEYS = TaggedCall(
    Tag("", ("\n", "<arg_key>", "</tool_call>"), keeps_end=True),
    Tag("<arg_key>", ("</arg_key>",)),
    "</arg_value>",
    gap=r"\s*<arg_value>",
)
_NAMED = HeadedCall(r"\s*([^\s<>{}\[\]\"'`:,]+)(?:[ ]*\n|>)\s*", part=r"\s*[^\s<>{}\[\]\"'`:,]*[ ]*(?:[\n>]\s*)?")
"""A name and JSON, which models of families with keys in tags write, too."""
_CDATA = ("<![CDATA[", "]]>")
_FUNCTION_CALLS = CallForm(_TOOL_CALL, _TOOL_CALL_END, shapes=(_FUNCTION, _JSON))
_KEY_CALLS = CallForm(_TOOL_CALL, _TOOL_CALL_END, shapes=(_KEYS, _NAMED, _JSON))
_LONGCAT_END = ("</longcat_tool_call>",)
_LONGCAT_KEYS = TaggedCall(
    Tag("", ("\n", "<longcat_arg_key>", *_LONGCAT_END), keeps_end=True),
    Tag("<longcat_arg_key>", ("</longcat_arg_key>",)),
    "</longcat_arg_value>",
    gap=r"\s*<longcat_arg_value>",
)
_IQUEST_END = ("</iquest_tool_call>",)
_MARKED_OBJECTS = CallForm(_TOOL_CALL, _TOOL_CALL_END, shapes=(_JSON, _FUNCTION))
_LLAMA = CallForm(
    ("<|python_tag|>",),
    ("</function>",),
    shapes=(_JSON, HeadedCall(r"([^<>\s]+)>\s*", "<function=")),
    is_bare=True,
)
_LISTED = CallForm(("<tool_calls>",), ("</tool_calls>",), written=(json_objects("<tool_calls>[", "]</tool_calls>"),))
_OBJECTS_APART = json_objects("<tool_call>\n", "\n</tool_call>", between="\n</tool_call>\n<tool_call>\n")
_DEEPSEEK = CallForm(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    shapes=(
        HeadedCall(
            r"(?:function<｜tool▁sep｜>)?([^\n<`{]+)(?:<｜tool▁sep｜>|\n```json\s)\s*",
            "<｜tool▁call▁begin｜>",
            fence="```",
        ),
    ),
    between=("<｜tool▁call▁end｜>", "```"),
)


def _dsml(outer: str, gap: str = "", name: str = "DSML") -> CallForm:
    begin, end = f"<｜{name}｜{gap}", f"</｜{name}｜{gap}"
    call = TaggedCall(
        Tag(f"{begin}invoke ", name_in="name"),
        Tag(f"{begin}parameter ", name_in="name"),
        f"{end}parameter>",
        f"{end}invoke>",
        type_in="string",
        texts="true",
    )
    return CallForm((f"{begin}{outer}>",), (f"{end}{outer}>",), shapes=(call,))


def _hunyuan(outer: tuple[str, str], separator: str) -> CallForm:
    head = Tag("", (separator,)) if separator else Tag("", ("\n", "<arg_key>", "</tool_call>"), keeps_end=True)
    written = WrittenCalls(
        f"{outer[0]}<tool_call>", separator, "</tool_call><tool_call>", f"</tool_call>{outer[1]}", style="glm_xml"
    )
    shape = replace(_KEYS, head=head)
    ends = (outer[1], "</tool_call>")
    return CallForm(_TOOL_CALL, ends, shapes=(shape,), lists=(outer[0],), written=(written,))


_ATTRIBUTE_ESCAPES = (("&quot;", '"'), ("&amp;", "&"))
_KIMI_K3 = TaggedCall(
    Tag("<|open|>call ", ("<|sep|>",), name_in="tool", escapes=_ATTRIBUTE_ESCAPES),
    Tag("<|open|>argument ", ("<|sep|>",), name_in="key", escapes=_ATTRIBUTE_ESCAPES),
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    type_in="type",
    texts="string",
)
_KIMI_K3_OBJECT = HeadedCall(
    r'(?:[\w-]+="[^"\n]*" )*?tool="([^"\n]*)"[^\n<]*<\|sep\|>\s*<\|open\|>json[^\n<]*<\|sep\|>\s*',
    _KIMI_K3.head.begin,
    lambda header, _: _KIMI_K3.head.meant(header),
)
"""All arguments as one object: how the template writes those that a client gives as a text."""
_KIMI_K3_ANSWER = tuple(f"<|{mark}|>{name}<|sep|>" for name in ("response", "message") for mark in ("open", "close"))
_STEP3 = TaggedCall(
    Tag("<steptml:invoke ", name_in="name"),
    Tag("<steptml:parameter ", name_in="name"),
    "</steptml:parameter>",
    "</steptml:invoke>",
)
_STEP3_HEAD = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
_MINIMAX = "]<]minimax[>["
_MINIMAX_M3 = TaggedCall(
    Tag(f"{_MINIMAX}<invoke ", name_in="name"),
    Tag(f"{_MINIMAX}<"),
    _MINIMAX + "</{key}>",
    f"{_MINIMAX}</invoke>",
    nested=_MINIMAX,
)
_CITATIONS = ("<co>", "</co…>")
_COHERE = CallForm(
    ("<|START_ACTION|>",),
    ("<|END_ACTION|>",),
    drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    call_id=index_alone,
)
_MUSE = MessageForm(
    CallForm(
        ("<atem:function_calls>",),
        ("</atem:function_calls>",),
        shapes=(
            TaggedCall(
                Tag("<atem:invoke ", name_in="name"),
                Tag("<atem:parameter ", name_in="name"),
                "</atem:parameter>",
                "</atem:invoke>",
                name_of=undoubled_name,
            ),
        ),
    ),
    thoughts=("self", ""),
    answers=("user", "commentary"),
)
_PLAMO = "<|plamo:{}:plamo|>".format

_WRITTEN_KEYS = replace(
    _KEY_CALLS,
    written=(WrittenCalls("<tool_call>", "\n", "</tool_call>\n<tool_call>", "</tool_call>", style="glm_xml"),),
)
_WRITTEN_FUNCTIONS = replace(
    _FUNCTION_CALLS,
    written=(
        WrittenCalls(
            "<tool_call>\n<function=",
            ">",
            "</function>\n</tool_call>\n<tool_call>\n<function=",
            "</function>\n</tool_call>",
            style="qwen_xml",
        ),
    ),
)
_INTERN = CallForm(
    ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    ("<|action_end|>",),
    written=(
        json_objects(
            "<|action_start|><|plugin|>",
            "<|action_end|>",
            between="<|action_end|><|action_start|><|plugin|>",
            arguments="parameters",
        ),
    ),
)

CALL_FORMS: Mapping[str, CallForm] = {
    "apertus": CallForm(
        ("<|tools_prefix|>",),
        ("<|tools_suffix|>",),
        shapes=(JsonCall(is_keyed=True),),
        written=(WrittenCalls('<|tools_prefix|>[{"', '": ', '}, {"', "}]<|tools_suffix|>"),),
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "dots": CallForm(
        ("<dots_function_call>",),
        ("</dots_function_call>",),
        shapes=(_INVOKE, _JSON),
        written=(
            WrittenCalls(
                '<dots_function_call><invoke name="',
                '">',
                '</invoke><invoke name="',
                "</invoke></dots_function_call>",
                style="minimax_xml",
            ),
        ),
    ),
    "ernie45": replace(_MARKED_OBJECTS, drops=("<response>", "</response>"), written=(_OBJECTS_APART,)),
    "functionary": CallForm(
        ends=("</function>",),
        shapes=(HeadedCall(r"([^>\n]*)>\s*", "<function="),),
        written=(WrittenCalls("<function=", ">", "</function><function=", "</function>"),),
    ),
    "functionary_v32": CallForm(
        fences=(">>>",),
        shapes=(HeadedCall(r"([\w.:-]+)\n\s*"),),
        drops=(">>>all\n",),
    ),
    "functiongemma": CallForm(("<start_function_call>",), ("<end_function_call>",), shapes=(KeyedCall("<escape>"),)),
    "gemma4": CallForm(("<|tool_call>",), ("<tool_call|>",), shapes=(KeyedCall('<|"|>'),)),
    "gigachat3": CallForm(
        ("<|function_call|>", "function call<|role_sep|>\n", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
        ("<|message_sep|>",),
        written=(json_objects("<|function_call|>", between="<|function_call|>", mark="<|function_call|>"),),
    ),
    "gigachat35": _dsml("tool_calls", name="GCML"),
    "glm45": _KEY_CALLS,
    "glm47": _KEY_CALLS,
    "granite": CallForm(("<|tool_call|>", "<tool_call>"), written=(json_objects("<|tool_call|>[", "]"),)),
    "granite-20b-fc": CallForm(
        ("<function_call>",), written=(json_objects("<function_call> ", between="<function_call> "),)
    ),
    "granite4": replace(_MARKED_OBJECTS, written=(_OBJECTS_APART,)),
    "hermes": _MARKED_OBJECTS,
    "hunyuan_a13b": _LISTED,
    "hy_v3": _hunyuan(("<tool_calls>", "</tool_calls>"), "<tool_sep>"),
    "hy_v4": _hunyuan(("<tool_calls>", "</tool_calls>"), ""),
    "internlm": _INTERN,
    "interns1": _INTERN,
    "iquest_q1": CallForm(
        ("<iquest_tool_call>",),
        _IQUEST_END,
        shapes=(replace(_KEYS, head=Tag("", ("\n", "<arg_key>", *_IQUEST_END), keeps_end=True)), _JSON),
        written=(
            WrittenCalls(
                "<iquest_tool_call>",
                "\n",
                "</iquest_tool_call>\n<iquest_tool_call>",
                "</iquest_tool_call>",
                style="glm_xml",
            ),
        ),
    ),
    "jamba": replace(_LISTED, begins=("<tool_calls>", "<tool_call>"), ends=("</tool_calls>", "</tool_call>")),
    "k2_horizon": CallForm(
        ("<ifm|tool_call>",),
        ("</ifm|tool_calls>", "</ifm|tool_call>"),
        lists=("<ifm|tool_calls>",),
        shapes=(
            TaggedCall(
                Tag("", ("\n", "<ifm|arg_key>", "</ifm|tool_call>"), keeps_end=True),
                Tag("<ifm|arg_key>", ("</ifm|arg_key>",)),
                "</ifm|arg_value>",
                gap=r"\s*(?:<ifm\|arg_type>[^<]*</ifm\|arg_type>\s*)?<ifm\|arg_value>",
            ),
            _JSON,
        ),
    ),
    "kimi_k2": CallForm(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_end|>",),
        shapes=(HeadedCall(r"([^<]*)<\|tool_call_argument_begin\|>\s*", "<|tool_call_begin|>", kimi_name),),
        between=("<|tool_call_end|>",),
        call_id=function_and_index,
    ),
    "kimi_k3": CallForm(
        ("<|open|>tools<|sep|>",),
        ("<|close|>tools<|sep|>",),
        shapes=(_KIMI_K3, _KIMI_K3_OBJECT),
        between=("<|close|>json<|sep|>", "<|close|>call<|sep|>"),
        drops=_KIMI_K3_ANSWER,
    ),
    "lfm2": CallForm(("<|tool_call_start|>",), ("<|tool_call_end|>",), shapes=(PythonCall(),)),
    "ling3": _KEY_CALLS,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": CallForm(("<|python_start|>",), ("<|python_end|>",), shapes=(PythonCall(),), is_bare=True),
    "longcat": CallForm(("<longcat_tool_call>",), _LONGCAT_END, shapes=(_LONGCAT_KEYS, _JSON)),
    "mimo": _FUNCTION_CALLS,
    "minicpm5": CallForm(
        shapes=(
            TaggedCall(Tag("<function name="), Tag("<param name="), "</param>", "</function>", wrap=_CDATA),
            TaggedCall(Tag("<functionname="), Tag("<paramname="), "</param>", "</function>", wrap=_CDATA),
        ),
        written=(
            WrittenCalls('<function name="', '">', '</function>\n<function name="', "</function>", style="minicpm_xml"),
        ),
    ),
    "minimax_m2": CallForm(
        ("<minimax:tool_call>", "<tool_calls>", "<function_calls>", "<tool_call>"),
        ("</minimax:tool_call>", "</tool_calls>", "</function_calls>", "</tool_call>"),
        shapes=(_INVOKE, _JSON),
    ),
    "minimax_m3": CallForm((f"{_MINIMAX}<tool_call>",), (f"{_MINIMAX}</tool_call>",), shapes=(_MINIMAX_M3,)),
    "mistral": CallForm(
        ("[TOOL_CALLS]",),
        shapes=(
            HeadedCall(r"([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\s*[\w-]*)?\s*(?:\[ARGS\])?\s*"),
            _JSON,
        ),
        call_id=nine_characters,
        written=(
            WrittenCalls("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", mark="[ARGS]"),
            json_objects("[TOOL_CALLS] [", "]"),
        ),
    ),
    "nanbeige": _WRITTEN_FUNCTIONS,
    "nemotron_nano_v2": CallForm(
        ("<TOOLCALL>",), ("</TOOLCALL>",), written=(json_objects("<TOOLCALL>[", "]</TOOLCALL>"),)
    ),
    "olmo3": CallForm(("<function_calls>",), ("</function_calls>",), shapes=(PythonCall(),), is_bare=True),
    "phi4_mini_json": CallForm(("functools",), written=(json_objects("functools[", "]"),)),
    "plamo3": CallForm(
        (_PLAMO("begin_tool_requests"), _PLAMO("begin_tool_request")),
        (_PLAMO("end_tool_requests"), _PLAMO("end_tool_request"), _PLAMO("end_tool_arguments")),
        shapes=(
            HeadedCall(
                r"([^<]*)<\|plamo:end_tool_name:plamo\|>\s*<\|plamo:begin_tool_arguments:plamo\|>"
                r"(?:<\|plamo:constrain\|>json<\|plamo:msg\|>)?\s*",
                _PLAMO("begin_tool_name"),
            ),
        ),
    ),
    "poolside_v1": _WRITTEN_KEYS,
    "pythonic": CallForm(shapes=(PythonCall(),), is_bare=True),
    "qwen3_coder": _FUNCTION_CALLS,
    "qwen3_json": _MARKED_OBJECTS,
    "qwen3_xml": _FUNCTION_CALLS,
    "seed_oss": CallForm(
        ("<seed:tool_call>", "<tool_call>"),
        ("</seed:tool_call>", "</tool_call>"),
        shapes=(replace(_FUNCTION, trims_lines=False), _JSON),
        written=(
            WrittenCalls(
                "<seed:tool_call>\n<function=",
                ">",
                "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=",
                "</function>\n</seed:tool_call>",
                style="seed_xml",
            ),
        ),
    ),
    "solar_open2": CallForm(
        ("<|tool_call:start|>",),
        ("<|tool_call:end|>",),
        shapes=(
            TaggedCall(
                Tag("", ("\n", "<|tool_arg:start|>", "<|tool_call:end|>"), keeps_end=True),
                Tag("<|tool_arg:start|>", ("<|tool_arg:value|>",)),
                "<|tool_arg:end|>",
            ),
        ),
    ),
    "spark25": _WRITTEN_KEYS,
    "step3": CallForm(
        ("<｜tool_calls_begin｜>",),
        ("<｜tool_calls_end｜>",),
        shapes=(_STEP3,),
        between=("<｜tool_call_end｜>", "<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>"),
        written=(
            WrittenCalls(
                f"<｜tool_calls_begin｜>{_STEP3_HEAD}",
                '">',
                f"</steptml:invoke><｜tool_call_end｜>{_STEP3_HEAD}",
                "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
                style="step3_xml",
            ),
        ),
    ),
    "step3p5": _FUNCTION_CALLS,
    "step5": _WRITTEN_FUNCTIONS,
    "trinity": replace(_MARKED_OBJECTS, written=(_OBJECTS_APART,)),
    "xlam": CallForm(
        ("[TOOL_CALLS]", "<tool_call>"),
        ("</tool_call>", "```"),
        ("```json", "```"),
        is_bare=True,
        written=(json_objects("[", "]"),),
    ),
}
"""The form of calls, by the name of the tool call parser."""

MESSAGE_FORMS: Mapping[str, MessageForm] = {
    "muse": _MUSE,
    "muse_glimmer": replace(_MUSE, thoughts=("self",), answers=("user", "commentary", "")),
    "musespark1x": _MUSE,
}
"""The form of turns, by the name of both parsers."""

_THINK = ThoughtForm()
_THINKS_AT_ONCE = ThoughtForm(is_open=True)
_COHERE_THOUGHTS = ThoughtForm(
    "<|START_THINKING|>", "<|END_THINKING|>", drops=_COHERE.drops, everywhere=_CITATIONS, recurs=True
)

THOUGHT_FORMS: Mapping[str, ThoughtForm] = {
    **dict.fromkeys(
        (
            *("deepseek_v3", "deepseek_v31", "deepseek_v4", "deepseek_v41", "glm45", "glm47", "hy_v3", "hy_v4"),
            *("kimi_k2", "poolside_v1", "think"),
        ),
        _THINK,
    ),
    **dict.fromkeys(
        (
            *(
                "deepseek_r1",
                "granite_thinking_parser",
                "holo2",
                "iquest_q1",
                "ling3",
                "mimo",
                "minimax_m2",
                "nemotron_v3",
            ),
            *("olmo3", "qwen3", "step3", "step3p5", "step5"),
        ),
        _THINKS_AT_ONCE,
    ),
    "apertus": ThoughtForm("<|inner_prefix|>", "<|inner_suffix|>", recurs=True),
    "apriel": ThoughtForm("", "[BEGIN FINAL RESPONSE]", is_open=True, drops=("[END FINAL RESPONSE]",)),
    "cohere_command3": _COHERE_THOUGHTS,
    "cohere_command4": _COHERE_THOUGHTS,
    "ernie45": ThoughtForm(is_open=True, drops=("<response>", "</response>")),
    "granite3": ThoughtForm(drops=("<response>", "</response>")),
    "gemma4": ThoughtForm("<|channel>", "<channel|>", recurs=True, header="thought\n", drops=("<channel|>",)),
    "granite": ThoughtForm("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ThoughtForm(drops=("<answer>\n", "\n</answer>")),
    "k2_horizon": ThoughtForm(
        "<ifm|think>",
        "</ifm|think>",
        is_open=True,
        starts=("<ifm|think_fast>", "<ifm|think_faster>"),
        ends=("</ifm|think_fast>", "</ifm|think_faster>"),
    ),
    "kimi_k3": ThoughtForm(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ends=("<|open|>response<|sep|>",),
        drops=_KIMI_K3_ANSWER,
    ),
    "minicpmv": ThoughtForm(
        is_open=True, everywhere=tuple(f"<{bar}reserved_{n}{bar}>" for n in range(12, 16) for bar in ("", "|"))
    ),
    "minimax_m3": ThoughtForm("<mm:think>", "</mm:think>"),
    "mistral": ThoughtForm("[THINK]", "[/THINK]", recurs=True),
    "plamo3": ThoughtForm(
        _PLAMO("begin_think"), _PLAMO("end_think"), recurs=True, drops=(_PLAMO("end_think"), "<|plamo:tag|>")
    ),
    "seed_oss": ThoughtForm("<seed:think>", "</seed:think>"),
    "solar_open2": ThoughtForm("<|think:start|>", "<|think:end|>"),
}
"""The form of thoughts, by the name of the reasoning parser."""
