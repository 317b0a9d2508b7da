"""Parsers that are selected for a model without named ones; the excerpts are from real templates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Sign, guess

CHATML = "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{%- endfor %}"
QWEN3 = CHATML + "<think>\n\n</think>" + '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": ...}\n</tool_call>'
QWEN3_5 = (
    CHATML + "<think>\n</think><tool_call>\n<function={{ name }}>\n<parameter={{ key }}>\n</parameter></tool_call>"
)
GLM = "[gMASK]<sop><think>\n</think><tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key><arg_value>...</tool_call>"
DEEPSEEK_V3 = "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\n```json\n"
DEEPSEEK_V31 = "{%- if not thinking is defined %}{% endif %}"
DEEPSEEK_V31 += "<think>{% else %}</think>{% endif %}<｜Assistant｜><｜tool▁calls▁begin｜>{{ name }}"
OPENED_IF_ASKED = "{% if add_generation_prompt %}{% if enable_thinking %}<think>\\n{% endif %}{% endif %}"
LLAMA3_2 = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'

PYTHONIC = (
    "respond in the format [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"
)
HUNYUAN = '格式化为<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]</tool_calls>'

CASES = {
    "llama 3.2, in Python": (PYTHONIC, "llama", None, "pythonic"),
    "llama 4, in Python": ("Use exact format: [func_name1(param1=value1, ...)]", "llama4", None, "llama4_pythonic"),
    "phi 4 mini, of vLLM": ('formatted as functools[{"name": [function name]', "phi3", None, "phi4_mini_json"),
    "xlam": ('[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]', "qwen2", None, "xlam"),
    "hunyuan, without its type": (f"<think></think>{HUNYUAN}", "", "hunyuan_a13b", "hunyuan_a13b"),
    "granite 20b, without its type": ("<|function_call_library|> <function_call> {", "", None, "granite-20b-fc"),
    "qwen3": (QWEN3, "qwen3", "qwen3", "hermes"),
    "qwen2.5": (CHATML + "<tool_call>\n{...}\n</tool_call>", "qwen2", None, "hermes"),
    "qwen3.5": (QWEN3_5, "qwen3_5", "qwen3", "qwen3_coder"),
    "nemotron 3": (QWEN3_5, "nemotron_h", "nemotron_v3", "qwen3_coder"),
    "granite 4.2": (QWEN3_5, "granitemoehybrid", "granite_thinking_parser", "qwen3_coder"),
    "mimo": (QWEN3_5, "mimo_v2_flash", "mimo", "mimo"),
    "mimo, in JSON": (QWEN3, "mimo", "mimo", "hermes"),
    "step 5": (QWEN3_5, "step5_vl", "step5", "step5"),
    "muse spark": ("to=self<atem:function_calls>", "muse_spark_text", "muse", "muse"),
    "beam": ("", "beam", "beam", "beam"),
    "step 3.5": (QWEN3_5, "step3p5", "step3p5", "step3p5"),
    "glm 4.5": (GLM, "glm4_moe", "glm45", "glm45"),
    "deepseek v3": (DEEPSEEK_V3 + "{% if '</think>' in content %}", "deepseek_v3", None, "deepseek_v3"),
    "deepseek r1": (DEEPSEEK_V3 + "</think><｜Assistant｜><think>\n", "deepseek_v3", "deepseek_r1", "deepseek_v3"),
    "deepseek v3.1": (DEEPSEEK_V31, "deepseek_v3", "deepseek_v3", "deepseek_v31"),
    "deepseek v3.2": ("", "deepseek_v32", "deepseek_v3", "deepseek_v32"),
    "deepseek v4": ("", "deepseek_v4", "deepseek_v4", "deepseek_v4"),
    "kimi k2": ("<|tool_calls_section_begin|>", "kimi_k2", None, "kimi_k2"),
    "kimi k2 thinking": ("<think></think><|tool_calls_section_begin|>", "kimi_k2", "kimi_k2", "kimi_k2"),
    "minimax m2": ("<think></think><minimax:tool_call>\n<invoke name=", "minimax_m2", "minimax_m2", "minimax_m2"),
    "mistral": ("[INST] [/INST][TOOL_CALLS][", "mistral", None, "mistral"),
    "magistral": ("[THINK][/THINK][TOOL_CALLS]", "mistral", "mistral", "mistral"),
    "ministral, by code": ("", "ministral3", "mistral", "mistral"),
    "llama 3.1": (LLAMA3_2 + "<|python_tag|>", "llama", None, "llama3_json"),
    "llama 3.2": (LLAMA3_2, "llama", None, "llama3_json"),
    "llama 4": (LLAMA3_2, "llama4", None, "llama4_json"),
    "gemma 3": ("<start_of_turn>model", "gemma3", None, None),
    "gemma 4": ("<|channel>thought\n<channel|><|tool_call>call:{{ name }}<tool_call|>", "gemma4", "gemma4", "gemma4"),
    "granite 3": ("<|start_of_role|>write <|tool_call|> followed by a JSON list", "granite", None, "granite"),
    "granite 4": ("<tool_call>\n{...}\n</tool_call>", "granitemoehybrid", None, "granite4"),
    "seed oss": ("<seed:think></seed:think><seed:tool_call>\n<function=x><parameter=", "seed_oss", *["seed_oss"] * 2),
    "step 3": ("<think></think><｜tool_calls_begin｜><steptml:invoke", "step3_text", "step3", "step3"),
    "olmo 3": ("<think></think><function_calls>", "olmo3", "olmo3", "olmo3"),
    "lfm 2": ("<|tool_list_start|>[", "lfm2", None, "lfm2"),
    "hunyuan": ("<think></think><tool_calls>", "hunyuan_v1_moe", "hunyuan_a13b", "hunyuan_a13b"),
    "jamba": ("<tool_calls>[", "jamba", None, "jamba"),
    "command": ("<|START_THINKING|><|START_ACTION|>", "cohere2", "cohere_command3", "cohere_command3"),
    "minimax m1": (
        '<tool_calls>\n{"name": <tool-name>, "arguments": <object>}\n</tool_calls>',
        "minimax_m1",
        None,
        "jamba",
    ),
    "functionary 3.2": (">>>all\\n{{ content }}", "llama", None, "functionary_v32"),
    "functionary 3.1": ("<|python_tag|> <function=name>{{ arguments }}</function>", "llama", None, "functionary"),
    "lfm 2.5": ("content.split('</think>') List of tools: [", "lfm2", "think", "lfm2"),
    "apertus": ("<|inner_prefix|><|tools_prefix|>", "apertus", "apertus", "apertus"),
    "bielik": (f"'</think>' in content {OPENED_IF_ASKED} <tool_call>", "llama", "think", "hermes"),
    "no tools, no thoughts": (CHATML, "phi3", None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_template_selects_parsers_of_its_model(case: str) -> None:
    template, model_type, reasoning, tool_calls = CASES[case]
    assert template is not None
    assert model_type is not None
    assert (guess(REASONING, [template], model_type).parser, guess(TOOL_CALLS, [template], model_type).parser) == (
        reasoning,
        tool_calls,
    )


@given(st.sampled_from([*TOOL_CALLS, *REASONING]), st.text(max_size=20))
def test_every_sign_selects_its_parser_for_some_model(sign: Sign, between: str) -> None:
    signs = TOOL_CALLS if sign in TOOL_CALLS else REASONING
    template = between.join(sign.marks)
    found = {guess(signs, [template], kind).parser for kind in (*sign.types, "another") if sign.fits(template, kind)}
    assert sign.parser in found


@given(st.sampled_from(["<think>", "<think>\\n", "<think>\n", "'<think>' }}"]), st.text(max_size=20))
def test_prompt_that_need_not_open_a_thought_shows_if_it_does(opened: str, between: str) -> None:
    template = "<think></think>{%- if add_generation_prompt %}" + between
    assert guess(REASONING, [template + opened], "").parser == "think"
    assert guess(REASONING, [template + "<think>\\n\\n</think>"], "").parser == "qwen3"


@pytest.mark.parametrize("template", ["{% if tools %}", "{{ tools | tojson }}", "message.tool_calls"])
def test_tools_that_no_family_calls_are_a_doubt(template: str) -> None:
    guessed = guess(TOOL_CALLS, [CHATML, template], "new")
    assert (guessed.parser, guessed.doubt) == (None, "its template has tools, but shows no known way to call them")
    assert guess(REASONING, [template], "new").doubt == ""


def test_guess_gives_its_reason() -> None:
    assert guess(TOOL_CALLS, [QWEN3_5], "mimo_v2").why == (
        "its template has <function= and <parameter= and it is a mimo_v2 model"
    )
    assert guess(REASONING, [CHATML], "qwen2").why == "nothing in its template shows which one it needs"


def test_the_models_own_template_shows_what_the_operators_leaves_out() -> None:
    own = DEEPSEEK_V3 + "</think><｜Assistant｜><think>\n"
    assert guess(REASONING, [DEEPSEEK_V3, own], "deepseek_v3").parser == "deepseek_r1"
    assert guess(TOOL_CALLS, [QWEN3, DEEPSEEK_V3], "").parser == "hermes"


@pytest.mark.parametrize("case", CASES)
def test_known_model_gives_no_doubt(case: str) -> None:
    template, model_type, _, _ = CASES[case]
    assert template is not None
    assert model_type is not None
    assert {guess(signs, [template], model_type).doubt for signs in (REASONING, TOOL_CALLS)} == {""}


def test_model_type_of_another_family_is_a_doubt() -> None:
    guessed = guess(TOOL_CALLS, [QWEN3], "mistral")
    assert (guessed.parser, guessed.doubt) == ("hermes", "a mistral model usually needs mistral")
    assert guess(TOOL_CALLS, [QWEN3], "llama").doubt == ""


def test_own_template_of_another_family_is_a_doubt() -> None:
    guessed = guess(TOOL_CALLS, [QWEN3, LLAMA3_2], "llama")
    assert (guessed.parser, guessed.doubt) == ("hermes", "the model's own template shows llama3_json")
    assert guess(TOOL_CALLS, [QWEN3, QWEN3], "llama").doubt == ""
