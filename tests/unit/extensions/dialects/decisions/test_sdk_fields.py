"""The verdict of each field of a decision's body, as openai-python's types have it, and that the reader keeps to it.

A new version of the SDK with fields that stand in no table here fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from openai.types.decision_create_params import DecisionCreateParams

from penstock.extensions.dialects.decisions.dialect import DecisionReader
from penstock.extensions.dialects.decisions.labels import LETTERS, Label
from penstock.pipeline.errors import InvalidRequest
from tests.support.sdk_types import BodyTypes, Verdicts

Json: TypeAlias = Any

OF_ITEMS, OF_ANSWERS = (
    "InputUnionMember1DecisionInput",
    "InputDecisionInputAssistantMessageContentDecisionInputAssistantContentPartDecisionInput",
)
CALLS = {
    f"{OF_ITEMS}FunctionCall": "arguments call_id name namespace type",
    f"{OF_ITEMS}CustomToolCall": "input call_id name namespace type",
    f"{OF_ITEMS}FunctionCallOutput": "call_id output type",
    f"{OF_ITEMS}CustomToolCallOutput": "call_id output type",
}
VERDICTS = Verdicts(
    taken={
        "DecisionCreateParams": "input model prompt_cache_key questions safety_identifier",
        "QuestionQuestionParamPredicate": "instructions name type",
        "QuestionQuestionParamChoice": "choices instructions name type",
        "QuestionQuestionParamChoiceChoice": "description value",
        "QuestionQuestionParamScore": "instructions levels name type",
        "QuestionQuestionParamScoreLevel": "description label",
        "DecisionQuestionInputText": "text type",
        "DecisionQuestionInputImage": "detail image_url type",
        "DecisionInputJSON": "data type",
        "DecisionInputTextParam": "text type",
        "DecisionInputImageParam": "detail image_url type",
        **{f"{OF_ITEMS}{role}Message": "content role type" for role in ("User", "Developer", "System")},
        f"{OF_ITEMS}AssistantMessage": "content phase role type",
        f"{OF_ANSWERS}OutputText": "text type",
        f"{OF_ANSWERS}Refusal": "refusal type",
        **CALLS,
    },
    idle={
        "DecisionCreateParams.prompt_cache_options": "the engine caches prefixes by itself",
        **{f"PromptCacheOptions.{field}": "the engine caches prefixes by itself" for field in ("mode", "ttl")},
        **{
            f"{name}.prompt_cache_breakpoint": "the engine caches prefixes by itself"
            for name in ("DecisionInputTextParam", "DecisionInputImageParam")
        },
        "DecisionPromptCacheBreakpointParam.mode": "the engine caches prefixes by itself",
        **{f"{name}.id": "an input names no stored item" for name in CALLS},
        **{f"{name}.status": "what stands in an input has happened" for name in CALLS},
    },
    not_here={},
    refused={},
)
UNKNOWN = "of_tomorrow"
TYPES = BodyTypes(DecisionCreateParams, {}, {}, {}, "input", UNKNOWN)


def whole(body: Json) -> Json:
    """The body with a second choice and a second level, without which there is nothing to decide."""
    return {**body, "questions": [_whole(question) for question in body["questions"]]}


def _whole(question: Json) -> Json:
    match question:
        case {"choices": [choice]}:
            return {**question, "choices": [choice, {"value": "another"}]}
        case {"levels": [level]}:
            return {**question, "levels": [level, {"label": "another"}]}
        case _:
            return question


def bodies() -> Iterator[tuple[str, Json, Json]]:
    for probe in TYPES.probes(()):
        yield probe.field, whole(probe.value), whole(probe.without)


def read_of(body: Json) -> Json:
    """All that the reader makes of a body, or the place in which it refuses it."""
    reader = DecisionReader([Label(text, ()) for text in LETTERS])
    try:
        reading = reader(json.dumps(body).encode())
    except InvalidRequest as error:
        return error.param
    return [part().request for part in reader.parts(reading)], reading.wire


def test_every_field_of_the_sdk_has_a_verdict() -> None:
    found: Mapping[str, set[str]] = TYPES.objects(())
    assert VERDICTS.fields == found


def test_field_is_read_and_an_unknown_one_is_refused_in_its_place() -> None:
    wrong = list[str]()
    for field, body, _ in bodies():
        place = read_of(body)
        is_refused = isinstance(place, str)
        if is_refused != field.endswith(f".{UNKNOWN}") or (is_refused and not place.endswith(UNKNOWN)):
            wrong.append(f"{field}: {place}")
    assert wrong == []


def test_fields_have_the_effect_of_their_verdict() -> None:
    """What is optional changes what the reader makes of a body, or is listed; a content is the same as a list."""
    effects = dict[str, bool]()
    for field, body, without in bodies():
        if body != without and not field.endswith(UNKNOWN):
            effects[field] = effects.get(field, False) or read_of(body) != read_of(without)
    named = {name for name in effects if name.rpartition(".")[2] not in ("content", "role", "type")}
    assert {name for name in named if not effects[name]} == named & VERDICTS.idle.keys()
