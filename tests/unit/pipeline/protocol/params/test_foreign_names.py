"""Parameters of other APIs: each is refused, with the parameter of this API that means the same."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from penstock.pipeline.protocol.params.foreign_names import MEANT, OF_CHATS, ON
from penstock.pipeline.protocol.params.request import CreateResponse
from tests.support.requests import read_body, refused

HERE = CreateResponse.model_fields.keys()
FOREIGN = OF_CHATS.names


def vllm_fields(module: str, request: str) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the name and the default of each field of a class of vLLM."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    for node in ast.parse(Path(vllm.origin).parent.joinpath(module).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == request:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, field.value


def vllm_names(folder: str, request: str) -> Iterator[str]:
    return (name for name, _ in vllm_fields(f"entrypoints/openai/{folder}/protocol.py", request))


def test_every_parameter_of_openais_chat_completions_is_known() -> None:
    assert get_type_hints(CompletionCreateParamsBase).keys() - HERE <= set(FOREIGN)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("folder", "request_class"), [("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")]
)
def test_every_parameter_of_vllms_completions_is_known(folder: str, request_class: str) -> None:
    names = {name for name in vllm_names(folder, request_class) if not name.startswith("_")}
    assert len(names) > 30
    assert names - HERE <= set(FOREIGN)


@pytest.mark.vllm
def test_what_is_on_by_default_is_so_in_vllm() -> None:
    found = set[str]()
    for folder, request in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")):
        found |= on_by_default(f"entrypoints/openai/{folder}/protocol.py", request)
    assert {*ON} == found | on_by_default("sampling_params.py", "SamplingParams")


def on_by_default(module: str, request: str) -> set[str]:
    return {name for name, default in vllm_fields(module, request) if default is not None and is_true(default)}


def is_true(default: ast.expr) -> bool:
    """Return True for the value True, also as the ``default`` of a ``Field``."""
    given = (
        [keyword.value for keyword in default.keywords if keyword.arg == "default"]
        if isinstance(default, ast.Call)
        else [default]
    )
    return any(isinstance(value, ast.Constant) and value.value is True for value in given)


def test_meant_parameters_exist() -> None:
    assert {name.partition(".")[0] for name in MEANT.values()} <= HERE
    assert HERE.isdisjoint(FOREIGN)


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("padding", ["", "x" * 10**5], ids=["at once", "in pieces"])
def test_foreign_parameter_is_refused(name: str, padding: str) -> None:
    error = refused(json.dumps({"input": padding, name: 7}).encode())
    assert (error.status, error.param, error.code) == (400, name, "unknown_parameter")
    assert MEANT.get(name, "nothing like it") in error.message


@pytest.mark.parametrize("value", [None, False, []], ids=str)
def test_foreign_parameter_that_asks_for_nothing_is_ignored(value: Any) -> None:
    """Clients write the defaults of what they do not use."""
    names = [name for name in FOREIGN if value is not False or name not in ON]
    assert read_body(dict.fromkeys(names, value) | {"input": "x"}).input == "x"
    assert read_body({"input": "x", "n": 1, "modalities": ["text"]}).input == "x"
    assert refused(b'{"input": "x", "max_tokens": 0}').param == "max_tokens"


@pytest.mark.parametrize("name", sorted({*ON} & {*FOREIGN}))
def test_what_is_on_by_default_may_not_be_switched_off(name: str) -> None:
    assert refused(json.dumps({"input": "x", name: False}).encode()).param == name
    assert read_body({"input": "x", name: True}).input == "x"


@pytest.mark.parametrize("name", ["client_metadata", "x", "_penstock"])
def test_names_that_no_api_has_are_ignored(name: str) -> None:
    """Codex and others send keys of their own."""
    assert read_body({"input": "x", name: {"a": 1}}) == read_body({"input": "x"})
