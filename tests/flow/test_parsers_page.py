"""`stages/PARSERS.md`, whose tables are made from the code; ``--regen`` writes it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, Sign, guess
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS
from tests.support.paths import ROOT
from tests.support.vllm_source import SOURCES

PAGE = ROOT / "stages" / "PARSERS.md"

HEAD = """# Parsers of chat models

A chat model writes reasoning and calls in its family's own markup, which a parser reads. Penstock selects the parsers
when it starts: its log names them and the reason, and `penstock serve --print-pipeline MODEL` shows them.

* **Choice.** The first line of a table that fits is taken: the chat template has all texts of the line, and the model
  type (`model_type` in `config.json`) begins as the line says. The template of `--chat-template` comes first, then the
  model's own. Without a template the type alone decides.
* **Doubt.** A warning is logged if the model's own template shows another parser than the operator's, or if models of
  this type usually need another one.
* **Options.** `--tool-call-parser` and `--reasoning-parser` name a parser of these tables or of vLLM, a parser of your
  own, or `none`. If a parser that vLLM reads does not fit the model, the server does not start; if it was selected, it
  is left out with a warning.
* **Your own.** `file.py:name`, `module:name` or an entry point of the group `penstock.parsers` is a `CallForm`, a
  `ThoughtForm`, or a function that takes an `OutputStart` and returns a `TextParser`. If both options name the same
  function, its reader reads the thoughts and the calls. A reader that fails leaves the rest of the output as text.
  After a reasoning parser of your own, vLLM's tool call parsers are not available.
  [The recipe](RECIPES.md#a-parser-of-your-own) has one of each.
* **Plug-ins of vLLM.** `--tool-parser-plugin` and `--reasoning-parser-plugin` import a file or a module that registers
  parsers with vLLM, as in `vllm serve`. The other two options name them.
* **Readers.** One machine of penstock's own reads nearly all families, from a description of each
  (`stages/models/chat/forms.py`), each token at the same cost. vLLM's code reads the others. The names are the same.
* **Without vLLM** (`pip install transformers jinja2`, no PyTorch) a model whose engine runs elsewhere is served if its
  parsers are among these: {own}. Calls are then held to a grammar only if they are required, and images are not read.

## What counts as a call

* A call needs the mark that begins it, its name, and what may follow the name. A mark in a sentence is text. A call
  without its mark (`<function=...>` without `<tool_call>`), and a call in a thought, count only if they are whole.
* A value between two tags ends only before what may follow it: another parameter, the end of the call, or the end of
  the turn. So it may hold the tags themselves. A mark that ends calls and is a token of the vocabulary ends it, too.
* Values have the types of the function's schema, references and alternatives resolved. A value that does not fit stays
  as the model wrote it. A parameter without a name, or given again, is left out.
* A call whose last brackets or tags are missing is completed, and `penstock_repairs` counts it as `missing end`. A call
  that the model left open within a text or a value is `incomplete`, as is one whose arguments are no JSON object. The
  response is still `completed`. No tool runs with such a call.
* A call of a function that the request does not declare is answered with an error that the model reads.
* What stands after the last turn mark of the prompt decides if the output begins in a thought.
"""

TEMPLATES = {
    "template_alpaca": ("", None, None),
    "template_chatglm": ("", None, None),
    "template_chatglm2": ("", None, None),
    "template_chatml": ("", None, None),
    "template_falcon": ("", None, None),
    "template_falcon_180b": ("", None, None),
    "template_inkbot": ("", None, None),
    "template_teleflm": ("", None, None),
    "tool_chat_template_apertus": ("apertus", None, "apertus"),
    "tool_chat_template_deepseekr1": ("deepseek_v3", None, "deepseek_v3"),
    "tool_chat_template_deepseekv3": ("deepseek_v3", None, "deepseek_v3"),
    "tool_chat_template_deepseekv31": ("deepseek_v3", "deepseek_v3", "deepseek_v31"),
    "tool_chat_template_functiongemma": ("gemma3_text", None, "functiongemma"),
    "tool_chat_template_gemma3_pythonic": ("gemma3", None, "pythonic"),
    "tool_chat_template_gemma4": ("gemma4", "gemma4", "gemma4"),
    "tool_chat_template_glm4": ("glm4", None, "glm45"),
    "tool_chat_template_granite": ("granite", None, "granite"),
    "tool_chat_template_granite_20b_fc": ("gpt_bigcode", None, "granite-20b-fc"),
    "tool_chat_template_hermes": ("llama", None, "hermes"),
    "tool_chat_template_hunyuan_a13b": ("hunyuan_v1_moe", "hunyuan_a13b", "hunyuan_a13b"),
    "tool_chat_template_internlm2_tool": ("internlm2", None, "internlm"),
    "tool_chat_template_llama3.1_json": ("llama", None, "llama3_json"),
    "tool_chat_template_llama3.2_json": ("llama", None, "llama3_json"),
    "tool_chat_template_llama3.2_pythonic": ("llama", None, "pythonic"),
    "tool_chat_template_llama4_json": ("llama4", None, "llama4_json"),
    "tool_chat_template_llama4_pythonic": ("llama4", None, "llama4_pythonic"),
    "tool_chat_template_mistral": ("mistral", None, "mistral"),
    "tool_chat_template_mistral3": ("mistral3", None, "mistral"),
    "tool_chat_template_mistral_parallel": ("mistral", None, "mistral"),
    "tool_chat_template_muse_glimmer": ("muse_glimmer", "muse_glimmer", "muse_glimmer"),
    "tool_chat_template_phi4_mini": ("phi3", None, "phi4_mini_json"),
    "tool_chat_template_qwen3coder": ("qwen3_moe", None, "qwen3_coder"),
    "tool_chat_template_toolace": ("llama", None, "pythonic"),
    "tool_chat_template_xlam_llama": ("llama", None, "xlam"),
    "tool_chat_template_xlam_qwen": ("qwen2", None, "xlam"),
}
"""The templates in vLLM's ``examples``: the type of a model for each, and the parsers of reasoning and of calls."""

EXAMPLES = {path.stem: path for source in SOURCES for path in (source.folder.parent / "examples").glob("*.jinja")}


def code(texts: Iterable[str | None], between: str = "") -> str:
    """Return ``texts`` as code in a cell of a table; a text with backticks is put between two of them."""
    fenced = (f"`` {text} ``" if "`" in text else f"`{text}`" for text in texts if text)
    return between.join(fenced).replace("|", r"\|")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_table(*headings: str, rows: Iterable[str]) -> str:
    return "\n".join((row(*headings), "|---" * len(headings) + "|", *rows, ""))


def cells(sign: Sign) -> tuple[str, ...]:
    return f"`{sign.parser}`", code(sign.marks, " and "), code((f"{each}…" for each in sign.types), ", ")


def page() -> str:
    calls = (row(*cells(sign), "penstock" if sign.parser in OWN_CALLS else "vLLM") for sign in TOOL_CALLS)
    reasoning = (row(*cells(sign), "penstock" if sign.parser in OWN_THOUGHTS else "vLLM") for sign in REASONING)
    templates = (
        row(f"`{name}.jinja`", *(code([each]) for each in entry)) for name, entry in TEMPLATES.items() if entry[2]
    )
    return "\n".join(
        (
            HEAD.format(own=code(sorted({*OWN_CALLS, *OWN_THOUGHTS}), ", ")),
            "## Calls\n",
            markdown_table("parser", "template has", "model type", "read by", rows=calls),
            "## Reasoning\n",
            markdown_table("parser", "template has", "model type", "read by", rows=reasoning),
            "## Templates of vLLM\n",
            "The templates for tools in `examples` of vLLM, each given by `--chat-template` to a model of this type:\n",
            markdown_table("template", "model type", "reasoning", "calls", rows=templates),
            "The template for DeepSeek R1 shows no reasoning; the model's own template adds `deepseek_r1`.\n",
        )
    )


def test_page_is_made_from_the_code(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


if EXAMPLES:

    def test_every_template_of_vllm_is_listed() -> None:
        assert EXAMPLES.keys() == TEMPLATES.keys()

    @pytest.mark.parametrize("name", EXAMPLES)
    def test_template_of_vllm_selects_the_parsers_of_the_page(name: str) -> None:
        model_type, reasoning, calls = TEMPLATES[name]
        found = [guess(signs, [EXAMPLES[name].read_text()], model_type) for signs in (REASONING, TOOL_CALLS)]
        assert [(each.parser, each.doubt) for each in found] == [(reasoning, ""), (calls, "")]
