"""Each field of the SDK's tools and options is declared by the model of its object, and so has a verdict."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import responses as sdk
from openai.types.responses import response_create_params, tool_param, web_search_tool_param
from openai.types.shared_params import Reasoning
from pydantic import BaseModel

from penstock.pipeline.protocol.params import request, tools

PAIRS: list[tuple[Any, type[BaseModel]]] = [
    (sdk.FunctionToolParam, tools.FunctionToolParam),
    (sdk.CustomToolParam, tools.CustomToolParam),
    (sdk.NamespaceToolParam, tools.NamespaceToolParam),
    (sdk.WebSearchToolParam, tools.WebSearchToolParam),
    (sdk.WebSearchPreviewToolParam, tools.WebSearchToolParam),
    (web_search_tool_param.Filters, tools.WebFilters),
    (sdk.FunctionShellToolParam, tools.ShellToolParam),
    (sdk.LocalEnvironmentParam, tools.LocalEnvironment),
    (sdk.ContainerAutoParam, tools.ContainerEnvironment),
    (sdk.ContainerReferenceParam, tools.ContainerReference),
    (sdk.ApplyPatchToolParam, tools.ApplyPatchToolParam),
    (tool_param.LocalShell, tools.LocalShellToolParam),
    (tool_param.CodeInterpreter, tools.CodeInterpreterToolParam),
    (tool_param.CodeInterpreterContainerCodeInterpreterToolAuto, tools.AutoContainer),
    (tool_param.Mcp, tools.McpToolParam),
    (response_create_params.PromptCacheOptions, request.PromptCacheOptions),
    (response_create_params.StreamOptions, request.StreamOptions),
    (response_create_params.ContextManagement, request.ContextManagement),
    (Reasoning, request.ReasoningOptionsParam),
    (sdk.ResponseTextConfigParam, request.TextOptions),
]


@pytest.mark.parametrize(("of_sdk", "model"), PAIRS, ids=lambda each: each.__name__)
def test_every_field_of_the_sdk_has_a_verdict(of_sdk: Any, model: type[BaseModel]) -> None:
    declared = {field.alias or name for name, field in model.model_fields.items()}
    assert get_type_hints(of_sdk).keys() <= declared
