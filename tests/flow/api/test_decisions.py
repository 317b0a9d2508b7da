"""Decisions over a real socket, with OpenAI's own client, and an engine whose log probabilities are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from math import exp, inf
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Decision

from penstock.api.cli.replayer import replay_of
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.dialects.decisions.dialect import AT_ONCE, DECISIONS
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.frames import TokenLogprob
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import openai_client, wait_until
from tests.support.chat_templates import model_with_images
from tests.support.deciding_engine import LETTERS, UNLIKELY, DecidingEngine
from tests.support.fake_vllm import FakeVllm, own_logprob, running_fakes
from tests.support.server import Server, running_server, script

PATH = "/v1/decisions"
TRUE = {"type": "predicate", "instructions": "It is a complaint."}
TEAM = {"type": "choice", "instructions": "Which team?", "choices": [{"value": "billing"}, {"value": True}]}
BODY: dict[str, Any] = {"input": "I was charged twice.", "questions": [TRUE]}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Server[DecidingEngine], None]:
    async with running_server(DecidingEngine(), tmp_path, max_body_bytes=10_000_000) as served:
        yield served


@pytest.fixture
async def sdk(served: Server[DecidingEngine]) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai_client(served.url) as client:
        yield client


async def test_openai_python_reads_answers_of_all_types(
    served: Server[DecidingEngine], sdk: openai.AsyncOpenAI
) -> None:
    served.engine.likely = {
        "complaint": {"A": 0.6, "B": 0.2},
        "team": {"A": 0.1, "B": 0.3},
        "urgent": {"A": 0.1, "B": 0.2, "C": 0.1},
    }
    decision = await sdk.decisions.create(
        model="tiny",
        input=[
            {"role": "developer", "content": "The shop sells books."},
            {"role": "user", "content": [{"type": "input_text", "text": "I was charged twice."}]},
        ],
        questions=[
            {"type": "predicate", "instructions": "It is a complaint.", "name": "complaint"},
            {"type": "choice", "instructions": "Which team?", "choices": [{"value": "true"}, {"value": True}]},
            {
                "type": "score",
                "instructions": [{"type": "input_text", "text": "How urgent?"}],
                "levels": [{"label": "low"}, {"label": "middle", "description": "a day"}, {"label": "high"}],
            },
        ],
    )
    assert isinstance(decision, Decision)
    expected = [
        {"type": "predicate", "name": "complaint", "probability": 0.75},
        {
            "type": "choice",
            "name": None,
            "choice": True,
            "confidence": 0.75,
            "probabilities": [{"value": "true", "probability": 0.25}, {"value": True, "probability": 0.75}],
        },
        {
            "type": "score",
            "name": None,
            "score": 1.0,
            "confidence": 0.5,
            "probabilities": [
                {"value": 0, "label": "low", "probability": 0.25},
                {"value": 1, "label": "middle", "probability": 0.5},
                {"value": 2, "label": "high", "probability": 0.25},
            ],
        },
    ]
    for answer, wanted in zip(decision.answers, expected, strict=True):
        assert rounded(answer.model_dump()) == wanted
    assert (decision.model, decision.usage.output_tokens) == ("tiny", 3)
    assert decision.usage.input_tokens == sum(len(prompt.token_ids) for prompt in served.engine.prompts)
    assert decision.usage.total_tokens == decision.usage.input_tokens + 3


def rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 9)
        case dict():
            return {key: rounded(inner) for key, inner in value.items()}
        case list():
            return [rounded(inner) for inner in value]
        case _:
            return value


async def test_each_question_is_a_prompt_up_to_the_first_word_of_the_answer(served: Server[DecidingEngine]) -> None:
    choices = [{"value": "two\nlines", "description": "as in a letter"}, {"value": False}]
    json_part = {"type": "input_json", "data": {"order": 7, "items": [{"café": None}]}}
    body = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "See: "}, json_part]}],
        "questions": [TRUE, {"type": "choice", "instructions": "Which?", "choices": choices}],
    }
    assert (await served.post(body, PATH))[0] == 200
    first, second = (load_encoding().decode(prompt.token_ids) for prompt in served.engine.prompts)
    shared = first.partition("Judge")[0]
    assert shared == second.partition("Choose")[0]
    assert shared.endswith('See: {"order": 7, "items": [{"café": null}]}<|end|><|start|>user<|message|>')
    assert "It is a complaint.\n\nA: yes\nB: no\n" in first
    assert 'Which?\n\nA: "two\\nlines" (as in a letter)\nB: false\n' in second
    assert first.endswith("<|end|><|start|>assistant<|channel|>final<|message|>")
    sampling = served.engine.prompts[1].facts.sampling
    assert sampling.allowed_token_ids == sampling.logprob_token_ids == (LETTERS["A"], LETTERS["B"])
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (1, 0, 0)


async def test_conversation_may_have_calls_and_their_outputs(served: Server[DecidingEngine]) -> None:
    body = {
        "input": [
            {"type": "message", "role": "user", "content": "Where is it?"},
            {"type": "function_call", "call_id": "c1", "name": "track", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "In Paris"}]},
            {"type": "custom_tool_call", "call_id": "c2", "name": "grep", "input": "lost", "namespace": "files"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "3 lines"},
            {"role": "assistant", "phase": "final_answer", "content": [{"type": "output_text", "text": "In Paris."}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        ],
        "questions": [TRUE],
    }
    status, answer = await served.post(body, PATH)
    assert status == 200, answer
    prompt = load_encoding().decode(served.engine.prompts[0].token_ids)
    for text in ("functions.track", "files.grep", "In Paris<|end|>", "3 lines", "In Paris.", "No more."):
        assert text in prompt


async def test_parameters_reach_the_engine_or_have_no_effect(served: Server[DecidingEngine]) -> None:
    marked = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    part = {"type": "input_text", "text": BODY["input"], **marked}
    plain = {**BODY, "input": [{"role": "user", "content": [part]}]}
    given = {"prompt_cache_key": "k", "cache_salt": "s", "safety_identifier": "u", "joint": False}
    options = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}
    for body in (BODY, {**plain, **given, **options}):
        assert (await served.post(body, PATH))[0] == 200
    first, second = served.engine.prompts
    assert first.token_ids == second.token_ids
    assert second.facts.scheduling.cache_salt == "s"
    assert (second.facts.response.prompt_cache_key, second.facts.response.safety_identifier) == ("k", "u")


@pytest.mark.parametrize("count", [2, 128, 129, 255])
async def test_question_has_up_to_255_choices(served: Server[DecidingEngine], count: int) -> None:
    served.engine.likely = {"Which": {list(LETTERS)[count - 1]: 0.5}}
    choices = [{"value": f"option {number}"} for number in range(count)]
    body = {"input": "Hi", "questions": [{"type": "choice", "instructions": "Which?", "choices": choices}]}
    status, decision = await served.post(body, PATH)
    [answer] = decision["answers"]
    assert (status, answer["choice"], len(answer["probabilities"])) == (200, f"option {count - 1}", count)
    assert answer["confidence"] == pytest.approx(0.5 / (0.5 + (count - 1) * UNLIKELY))
    assert len(served.engine.prompts) == -(-count // 128)
    assert {len(prompt.facts.sampling.allowed_token_ids or ()) for prompt in served.engine.prompts} == {count}


async def test_first_question_runs_alone_and_the_others_some_at_once(served: Server[DecidingEngine]) -> None:
    engine = served.engine
    engine.hold()
    questions = [{**TRUE, "name": str(number)} for number in range(3 * AT_ONCE)]
    asking = asyncio.create_task(served.post({**BODY, "questions": questions}, PATH))
    await wait_until(lambda: engine.running == 1)
    engine.say(inf)
    await wait_until(lambda: engine.running == AT_ONCE)
    assert len(engine.prompts) == 1 + AT_ONCE
    engine.say_all()
    status, decision = await asking
    assert (status, [answer["name"] for answer in decision["answers"]]) == (200, [each["name"] for each in questions])
    assert engine.most_running == AT_ONCE


async def test_client_that_leaves_frees_the_engine(served: Server[DecidingEngine]) -> None:
    served.engine.hold()
    asking = asyncio.create_task(served.post({**BODY, "questions": [TRUE] * 20}, PATH))
    await wait_until(lambda: served.engine.running == 1)
    served.engine.say(inf)
    await wait_until(lambda: served.engine.running == AT_ONCE)
    asking.cancel()
    await served.wait_until_idle()
    assert len(served.engine.prompts) == 1 + AT_ONCE


async def test_decision_that_a_stopping_server_cuts_off_may_be_asked_for_again(
    served: Server[DecidingEngine],
) -> None:
    served.engine.hold()
    asking = asyncio.create_task(served.client.post(served.url + PATH, json={**BODY, "questions": [TRUE] * 3}))
    await wait_until(lambda: served.engine.running == 1)
    await served.scheduler.drain(0.1)
    async with await asking as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_a_question_counts_as_a_response_and_a_decision_as_a_request(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(responses=2, requests_per_minute=1)}
    async with running_server(DecidingEngine(), tmp_path, admission=admission) as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post({**BODY, "questions": [TRUE] * 9}, PATH))
        await wait_until(lambda: served.engine.running == 1)  # the first one runs alone
        served.engine.say(inf)
        await wait_until(lambda: served.engine.running == 2)
        served.engine.say_all()
        assert (await asking)[0] == 200
        assert served.engine.most_running == 2
        status, answer = await served.post(BODY, PATH)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("questions", [1, 20])
@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"refusal": EngineOverloaded("It is full.")}, 503, "It is full."),
        ({"error": EngineFailed("It broke.")}, 500, "It broke."),
        ({}, 500, "The engine reported no log probabilities of the options."),
    ],
)
async def test_a_fault_of_the_engine_is_one_error(
    tmp_path: Path, questions: int, change: dict[str, Any], status: int, message: str
) -> None:
    engine = ScriptedEngine(script("A", **change))
    async with running_server(engine, tmp_path) as served:
        answered, answer = await served.post({**BODY, "questions": [TRUE] * questions}, PATH)
        await served.wait_until_idle()
    assert (answered, answer["error"]["message"]) == (status, message)
    assert len(engine.prompts) <= (questions if "reported" in message else 1)


class Blind(ScriptedEngine):
    """An engine that reports no log probabilities of chosen tokens."""

    def __getattribute__(self, name: str) -> Any:
        if name == "scores_tokens":
            raise AttributeError(name)
        return super().__getattribute__(name)


async def test_engine_that_cannot_report_chosen_tokens_refuses(tmp_path: Path) -> None:
    async with running_server(Blind(script("A")), tmp_path) as served:
        status, answer = await served.post(BODY, PATH)
    assert (status, answer["error"]["param"]) == (400, "questions[0]")
    assert "log probabilities of chosen tokens" in answer["error"]["message"]


def choice(*values: Any, **more: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", "choices": [{"value": value} for value in values], **more}


def said(*content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(content), **more}]}


TEXT, IMAGE = {"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": PIXEL}
DEEP: Any = {"a": 1}
for _ in range(32):
    DEEP = {"a": [DEEP]}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"questions": [TRUE] * 401}, "questions", "array_above_max_length"),
        ({"questions": []}, "questions", "empty_array"),
        ({"questions": None}, "questions", "invalid_type"),
        ({"questions": [TRUE, {"type": "boolean"}]}, "questions[1].type", "invalid_value"),
        ({"questions": [{"instructions": "?"}]}, "questions[0].type", "missing_required_parameter"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing_required_parameter"),
        ({"questions": [{**TRUE, "criteria": 1}]}, "questions[0].criteria", "unknown_parameter"),
        ({"questions": [{**TRUE, "name": None}]}, "questions[0].name", "invalid_type"),
        ({"questions": [choice("a")]}, "questions[0].choices", "empty_array"),
        ({"questions": [choice(*map(str, range(256)))]}, "questions[0].choices", "array_above_max_length"),
        ({"questions": [TRUE, choice("a", True, "a")]}, "questions[1].choices[2].value", "invalid_value"),
        ({"questions": [choice("a", 1)]}, "questions[0].choices[1].value", "invalid_type"),
        ({"questions": [choice("a", "b", levels=[])]}, "questions[0].levels", "unknown_parameter"),
        (
            {"questions": [{"type": "score", "instructions": "?", "levels": [{"label": "a"}]}]},
            "questions[0].levels",
            "empty_array",
        ),
        ({"questions": [{**TRUE, "instructions": [IMAGE]}]}, "questions[0].instructions[0]", None),
        (
            {"questions": [{**TRUE, "instructions": [{"type": "input_json", "data": DEEP}]}]},
            "questions[0].instructions[0].data",
            "invalid_value",
        ),
        ({"input": []}, "input", "empty_array"),
        ({"input": 5}, "input", "invalid_type"),
        (said({**TEXT, "text": 5}), "input[0].content[0].text", "invalid_type"),
        (said({**TEXT, "cache": 5}), "input[0].content[0].cache", "unknown_parameter"),
        (said({"type": "output_text", "text": "Hi"}), "input[0].content[0].type", "invalid_value"),
        (said(TEXT, IMAGE, role="system"), "input[0].content[1].type", "invalid_value"),
        (said(TEXT, role="tool"), "input[0].role", "invalid_value"),
        (said(TEXT, phase="commentary"), "input[0].phase", "invalid_value"),
        (said(TEXT, id="msg_1"), "input[0].id", "unknown_parameter"),
        (said({**IMAGE, "file_id": "file_1"}), "input[0].content[0].file_id", "unknown_parameter"),
        (said({"type": "input_image"}), "input[0].content[0].image_url", "missing_required_parameter"),
        (said(IMAGE), "input[0].content[0]", None),
        (
            said({"type": "input_json", "data": [{"a": "b" * 2**18}]}),
            "input[0].content[0].data",
            "string_above_max_length",
        ),
        (said({"type": "input_json", "data": {"a": [0] * 10_000}}), "input[0].content[0].data", "invalid_value"),
        (said({"type": "input_json", "data": "text"}), "input[0].content[0].data", "invalid_type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id", None),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": ""}]}, "input", None),
        ({"input": "long " * 9_000}, "input", "context_length_exceeded"),
        ({"joint": True}, "joint", "unsupported_parameter"),
        ({"stream": True}, "stream", "unknown_parameter"),
        ({"temperature": 1}, "temperature", "unknown_parameter"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "unsupported_parameter"),
        ({"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode", "invalid_value"),
        ({"prompt_cache_options": {"x": 1}}, "prompt_cache_options.x", "unknown_parameter"),
        ({"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length"),
        ({"cache_salt": ""}, "cache_salt", "empty_string"),
    ],
)
async def test_wrong_body_is_refused_with_the_place(
    served: Server[DecidingEngine], fields: dict[str, Any], param: str, code: str | None
) -> None:
    served.engine.context_length = 8192
    status, answer = await served.post({**BODY, **fields}, PATH)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert served.engine.prompts == []


async def test_unknown_model_is_not_found(served: Server[DecidingEngine]) -> None:
    status, answer = await served.post({**BODY, "model": "gpt-6-luna"}, PATH)
    assert (status, answer["error"]["param"]) == (404, "model")


async def test_model_that_sees_gets_images(tmp_path: Path) -> None:
    chat = model_with_images()
    token = chat.vocabulary.encode("A")[0]
    engine = ScriptedEngine(Script((token,), logprobs=(TokenLogprob(-0.5, ((token, -0.5),)),)))
    broken = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    async with running_server(engine, tmp_path, model=chat, sees_images=True) as served:
        about = {**TRUE, "instructions": [TEXT, IMAGE]}
        status, decision = await served.post({**said(TEXT, IMAGE), "questions": [about]}, PATH)
        assert (status, decision["answers"][0]["probability"]) == (200, 1)
        for body, place in (
            (said(TEXT, broken), "input[0].content[1].image_url"),
            ({"questions": [TRUE, {**TRUE, "instructions": [TEXT, broken]}]}, "questions[1].instructions[1].image_url"),
        ):
            status, answer = await served.post({**BODY, **body}, PATH)
            assert (status, answer["error"]["param"]) == (400, place)
    text = chat.vocabulary.decode(engine.prompts[0].token_ids)
    assert (text.count("<image>"), text.endswith("<|im_start|>assistant\n")) == (2, True)
    assert len(engine.prompts[0].images) == 2


@pytest.mark.parametrize("scale_out", [True, False])
async def test_vllm_over_http_reports_the_options(tmp_path: Path, scale_out: bool) -> None:
    vllm = FakeVllm(scale_out=scale_out)
    async with running_fakes(vllm), AsyncExitStack() as closing:
        engine = await start_vllm_http([vllm.url])
        closing.push_async_callback(engine.close)
        served = await closing.enter_async_context(running_server(engine, tmp_path))
        vllm.tokens = (LETTERS["B"],)
        status, decision = await served.post({**BODY, "questions": [TEAM]}, PATH)
    assert status == 200, decision
    weights = [exp(own_logprob(LETTERS[letter])) for letter in "AB"]
    found = [each["probability"] for each in decision["answers"][0]["probabilities"]]
    assert found == pytest.approx([weight / sum(weights) for weight in weights])
    assert vllm.prompts[-1]["logprob_token_ids"] == [LETTERS["A"], LETTERS["B"]]


async def test_a_recording_has_a_question_that_replays_to_the_same_probabilities(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recordings", pause=0.01)
    engine = DecidingEngine(likely={"complaint": {"A": 0.6, "B": 0.2}})
    async with AsyncExitStack() as closing:
        closing.push_async_callback(recorder.close)
        served = await closing.enter_async_context(running_server(engine, tmp_path, edit=recorder.tapped))
        status, decision = await served.post(BODY, PATH)
        assert status == 200
    [folder] = (tmp_path / "recordings").iterdir()
    request = json.loads((folder / "request.json").read_bytes())
    assert request["logprob_token_ids"] == [LETTERS["A"], LETTERS["B"]]
    wire = DECISIONS.read(json.dumps(BODY).encode()).wire
    for since in ("parse", "render"):
        replayed = (await replay_of(folder, since)).trace.after("persist")
        async with wire.translated(source_of(replayed.frames)) as reads:
            again = json.loads(wire.json(await wire.fold(reads)))
        assert again == decision


async def test_nothing_is_stored_(served: Server[DecidingEngine]) -> None:
    assert (await served.post(BODY, PATH))[0] == 200
    [prompt] = served.engine.prompts
    assert (await served.get(f"/v1/responses/{prompt.facts.response_id}"))[0] == 404
