"""The names that the product imports from vLLM, and the parsers that it knows, in each version that is here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from penstock.api.settings import Settings
from penstock.api.settings.from_vllm import INSTEAD
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS
from penstock.stages.models.vllm_private import ENGINE_PARTS, PARSER_PARTS, SCHEDULER_PARTS, PrivatePart
from tests.support.paths import PRODUCT, ROOT
from tests.support.vllm_source import SINCE, SOURCES, VllmSource

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.folder.parent.name)),
]

TOOL_TABLE = ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
REASONING_TABLE = ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")

NOT_GUESSED = {
    "glm47": "another name of glm45",
    "qwen3_json": "another name of hermes",
    "qwen3_xml": "another name of qwen3_coder",
    "musespark1x": "another name of muse",
    "holo2": "deepseek_v3 for a model that thinks unless its request says otherwise",
    "minimax_m2_append_think": "leaves the reasoning in the message",
    "openai": "reads gpt-oss, which speaks Harmony",
    "openai_gptoss": "reads gpt-oss, which speaks Harmony",
    "hf": "reads models whose tokenizer describes its own output",
}
"""Parsers of vLLM that no model gets unless the operator names them."""


def used(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Find each import from vLLM in the product: the file, the module and the name."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(path.relative_to(ROOT)), node.module or "", each.name) for each in node.names)


def test_names_that_the_product_imports_exist(source: VllmSource) -> None:
    """A name may be imported from several modules, as it stands in one per version of vLLM."""
    places: dict[tuple[str, str], list[str]] = {}
    for path, module, name in chain.from_iterable(used(ROOT / top) for top in PRODUCT):
        places.setdefault((path, name), []).append(module)
    assert len(places) > 20
    assert [
        (path, name)
        for (path, name), modules in places.items()
        if not any(source.has(module, name) for module in modules)
    ] == []


@pytest.mark.parametrize("part", [*ENGINE_PARTS, *PARSER_PARTS, *SCHEDULER_PARTS], ids=lambda part: part.owner)
def test_private_parts_exist(part: PrivatePart, source: VllmSource) -> None:
    assert source.has(part.module, part.owner)
    if part.attributes:
        assert set(part.attributes) - source.attributes(part.module, part.owner) == set()


def test_parsers_of_vllm_are_those_that_are_known(source: VllmSource) -> None:
    """A new name needs a sign in `families`, or a reason here."""
    for table, signs in ((TOOL_TABLE, TOOL_CALLS), (REASONING_TABLE, REASONING)):
        guessed, registered = {sign.parser for sign in signs}, source.registered(*table)
        assert registered - guessed - NOT_GUESSED.keys() == set()
        assert guessed - registered - SINCE.keys() - {*OWN_CALLS, *OWN_THOUGHTS} == set()


def test_switches_of_the_http_server_are_known(source: VllmSource) -> None:
    """The installed version is checked by its own parser of arguments, in the tests of `penstock serve`."""
    places = (source.module(f"vllm.entrypoints.{place}.cli_args") for place in ("common", "launchers"))
    (file,) = filter(None, places)
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    fields = [each for node in classes for each in node.body if isinstance(each, ast.AnnAssign)]
    options = {f"--{ast.unparse(field.target).replace('_', '-')}" for field in fields}
    assert "--tool-strict-level" in options
    ours = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | {"--lora-modules", "--api-key"}
    assert options - ours - INSTEAD.keys() == set()
