"""Sessions that a server recorded: which prompts extend the turn before, by API and by model, and why others do not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.http.auth import Keys
from penstock.extensions.rollouts.cuts import ANALYSIS
from penstock.extensions.rollouts.paths import PathTurn, TokenPath
from penstock.extensions.rollouts.sessions import Session, rollouts
from penstock.pipeline.frames import TokenIds
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.generations import WeightSpan
from penstock.pipeline.recordings.format import CHANGED_TURN, FORMAT, Header
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.recent_calls import RecentCalls
from penstock.services.tools import NestedCall, Toolbox
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.optional.rewrite import Rewrite
from tests.support.api_clients import Json, conversation_id, openai_client
from tests.support.chat_families import family_model
from tests.support.paths import HARMONY as HARMONY_CASES
from tests.support.paths import TINY_QWEN
from tests.support.scripted_tools import ScriptedProgram
from tests.support.server import (
    CALL,
    HELLO,
    WEATHER,
    PacedEngine,
    ScriptedServer,
    recorded_folders,
    recording_server,
    running_server,
    script,
)
from tests.support.token_upstream import PROMPT, token_upstream
from tests.support.tool_servers import python_markup
from tests.support.wiretaps import recorded_server

KEYS = ("sk-alice-0123456789", "sk-bob-0123456789ab")


@dataclass(frozen=True)
class Said:
    """A turn of the model, and the reaction of the agent: a result if the model makes a call, else a message."""

    thought: str
    text: str
    calls: bool
    reaction: str


TALK = (
    Said("It asks for the weather.", "Paris", True, "sunny"),
    Said("One more.", "Oslo", True, "rain"),
    Said("Enough.", "Sunny, and rain.", False, "And Rome?"),
    Said("Look again.", "Rome", True, "hot"),
    Said("That is all.", "Hot.", False, "Thanks."),
)


def harmony_tokens(said: Said) -> TokenIds:
    called = f" to=functions.look<|channel|>commentary json<|message|>{_arguments(said)}<|call|>"
    rest = called if said.calls else f"<|channel|>final<|message|>{said.text}<|return|>"
    text = f"<|channel|>analysis<|message|>{said.thought}<|end|><|start|>assistant{rest}"
    return tuple(load_encoding().encode_markup(text))


def own_harmony_tokens(said: Said) -> TokenIds:
    """The form in which gpt-oss writes a call, and a spelling of arguments that clients do not send again."""
    rendered = load_encoding().decode(harmony_tokens(said))
    written = rendered.replace(" to=functions.look<|channel|>commentary json", _OWN_HEADER).replace('": "', '" :  "')
    return tuple(load_encoding().encode_markup(written))


_OWN_HEADER = "<|channel|>commentary to=functions.look <|constrain|>json"


def own_qwen_tokens(said: Said) -> TokenIds:
    return qwen_tokens(said, '": "', '":"')


def qwen_tokens(said: Said, rendered: str = "", own: str = "") -> TokenIds:
    words = family_model(TINY_QWEN.name).vocabulary
    arguments = _arguments(said).replace(rendered, own) if rendered else _arguments(said)
    called = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    thought = ("<think>", f"\n{said.thought}\n", "</think>", "\n\n")
    rest = f"{called if said.calls else said.text}<|im_end|>"
    return tuple(token for piece in (*thought, rest) for token in words.encode(piece))


def _arguments(said: Said) -> str:
    return json.dumps({"city": said.text})


@dataclass(frozen=True)
class Model:
    load: Callable[[], ChatModel | None]
    tokens: Callable[[Said], TokenIds]
    encoding: str


HARMONY = Model(lambda: None, harmony_tokens, "harmony")
HARMONY_OWN = Model(lambda: None, own_harmony_tokens, "harmony")
QWEN = Model(lambda: family_model(TINY_QWEN.name), qwen_tokens, "chat")
QWEN_OWN = Model(lambda: family_model(TINY_QWEN.name), own_qwen_tokens, "chat")
models = pytest.mark.parametrize(
    "model",
    [
        pytest.param(HARMONY, id="harmony"),
        pytest.param(HARMONY_OWN, id="harmony-own"),
        pytest.param(QWEN, marks=pytest.mark.vllm, id="qwen"),
        pytest.param(QWEN_OWN, marks=pytest.mark.vllm, id="qwen-own"),
    ],
)

Client = Callable[[ScriptedServer, Callable[[Said], None]], Awaitable[None]]


def responses(*, changed: Callable[[list[Json]], list[Json]] | None = None, **fields: Any) -> Client:
    """A client of the Responses API that names the response before or, with ``changed``, sends all items again."""

    async def talk(served: ScriptedServer, says: Callable[[Said], None]) -> None:
        tool: Json = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        body: Json = {"input": [{"role": "user", "content": "Hi"}], "tools": [tool], **fields}
        if "conversation" in fields:
            body["conversation"] = conversation_id(await served.create_conversation())
        for said in TALK:
            says(said)
            status, response = await served.post(body)
            assert status == 200
            call = response["output"][-1].get("call_id")
            result = {"type": "function_call_output", "call_id": call, "output": said.reaction}
            news = [result if call else {"role": "user", "content": said.reaction}]
            if changed:
                body["input"] = [*body["input"], *changed(response["output"]), *news]
            else:
                body["input"] = news
                if "conversation" not in body:
                    body["previous_response_id"] = response["id"]

    return talk


def without_thoughts(items: list[Json]) -> list[Json]:
    return [item for item in items if item["type"] != "reasoning"]


def chat(*fields: str) -> Client:
    """A client of the Chat API that sends these fields of an answer again."""

    async def talk(served: ScriptedServer, says: Callable[[Said], None]) -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        body: Json = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
        for said in TALK:
            says(said)
            status, answer = await served.post(body, "/v1/chat/completions")
            assert status == 200
            message = answer["choices"][0]["message"]
            kept = {name: message[name] for name in fields if name in message}
            news: Json = {"role": "user", "content": said.reaction}
            if message.get("tool_calls"):
                call = message["tool_calls"][0]["id"]
                news = {"role": "tool", "tool_call_id": call, "content": said.reaction}
            body["messages"] = [*body["messages"], kept, news]

    return talk


async def messages(served: ScriptedServer, says: Callable[[Said], None]) -> None:
    """A client of the Messages API that sends all blocks again."""
    tool = {"name": "look", "input_schema": {"type": "object"}}
    asked = {"role": "user", "content": "Hi"}
    body: Json = {"model": "tiny", "max_tokens": 2000, "messages": [asked], "tools": [tool]}
    for said in TALK:
        says(said)
        status, answer = await served.post(body, "/v1/messages")
        assert status == 200
        news: Any = said.reaction
        if (block := answer["content"][-1])["type"] == "tool_use":
            news = [{"type": "tool_result", "tool_use_id": block["id"], "content": said.reaction}]
        answered = {"role": "assistant", "content": answer["content"]}
        body["messages"] = [*body["messages"], answered, {"role": "user", "content": news}]


KEPT = [(0, 3, ""), (3, 5, "thoughts")]
"""The turns of paths, and the reason of their cuts, if an agent keeps all: templates leave out old thoughts."""

LOST = [(0, 1, ""), *((number, number + 1, "thoughts") for number in range(1, 5))]
"""The same, if it keeps no thoughts."""

CLIENTS: Mapping[str, tuple[Client, list[tuple[int, int, str]]]] = {
    "previous_response_id": (responses(), KEPT),
    "conversation": (responses(conversation=""), KEPT),
    "sealed thoughts": (responses(store=False, changed=list), KEPT),
    "no thoughts": (responses(store=False, changed=without_thoughts), LOST),
    "messages": (messages, KEPT),
    "chat": (chat("role", "content", "tool_calls", "reasoning"), KEPT),
    "chat without thoughts": (chat("role", "content", "tool_calls"), LOST),
}


def exported(folder: Path, engine: ScriptedEngine, *, sessions: int = 1) -> list[Session]:
    """Return the sessions of recordings, whose turns have the very prompts of the engine."""
    found = list(rollouts([folder]))
    assert len(found) == sessions
    prompts = sorted(tuple(prompt.token_ids) for prompt in engine.prompts)
    assert sorted(prompt_of(path, turn) for session in found for path, turn in trained(session)) == prompts
    assert not any(session.skipped for session in found)
    return found


def trained(session: Session) -> list[tuple[TokenPath, PathTurn]]:
    return [(path, turn) for path in session.paths for turn in path.turns if turn.is_trained]


def prompt_of(path: TokenPath, turn: PathTurn) -> TokenIds:
    return tuple(path.token_ids[: turn.begin])


def texts_of(path: TokenPath) -> str:
    return load_encoding().decode(path.token_ids)


@models
@pytest.mark.parametrize("name", CLIENTS)
async def test_prompt_extends_the_turn_before_as_far_as_the_template_keeps_it(
    tmp_path: Path, model: Model, name: str
) -> None:
    client, paths = CLIENTS[name]
    engine, folder = ScriptedEngine(), tmp_path / "recordings"
    described: Any = {"described": Header(FORMAT, encoding=model.encoding)}  # type: ignore[arg-type]

    def says(said: Said) -> None:
        engine.script = Script(model.tokens(said))

    async with recording_server(engine, folder, model=model.load(), recorder=described) as served:
        await client(served, says)
    (session,) = exported(folder, engine)
    written = [model.tokens(said) for said in TALK]
    for path, (first, end, _) in zip(session.paths, paths, strict=True):
        outputs = [tuple(path.token_ids[turn.begin : turn.end]) for turn in path.turns]
        assert outputs == written[first:end]
    assert [path.cut.reason if path.cut else "" for path in session.paths] == [reason for *_, reason in paths]
    assert [path.branch for path in session.paths] == [None] * len(paths)
    read = [result.text for path, turn in trained(session) for result in turn.results]
    assert read == [said.reaction for said in TALK[:-1] if said.calls]
    by_response = {turn.response: at for at, (_, turn) in enumerate(trained(session))}
    cuts = [path.cut for path in session.paths if path.cut]
    assert [by_response[cut.response] for cut in cuts] == [first - 1 for first, *_ in paths[1:]]


async def test_tokens_of_thoughts_before_a_call_are_those_of_the_model(tmp_path: Path) -> None:
    """The Chat API has no place for sealed thoughts: the process remembers them with the call after them."""
    engine, folder = ScriptedEngine(), tmp_path / "recordings"
    encode = load_encoding().encode

    def says(said: Said) -> None:
        spelled = [token for letter in said.thought for token in encode(letter)]
        tokens = harmony_tokens(said)
        after = 3 + len(encode(said.thought))
        engine.script = Script((*tokens[:3], *spelled, *tokens[after:]))

    async with recording_server(engine, folder) as served:
        await chat("role", "content", "tool_calls", "reasoning")(served, says)
    (session,) = exported(folder, engine)
    reasons = [path.cut.reason if path.cut else "" for path in session.paths]
    assert reasons == ["", "thoughts"]


async def test_the_channel_of_thoughts_is_a_token() -> None:
    assert load_encoding().encode("analysis") == [ANALYSIS]


@pytest.mark.parametrize("change", ["forgotten", "another argument", "another function", "nothing"])
async def test_call_that_is_rendered_in_another_way_is_a_cut(tmp_path: Path, change: str) -> None:
    """A process remembers the tokens of the calls that it has sent, for as long as the client changes none."""
    engine, folder = ScriptedEngine(script(CALL)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        asked: Json = {"tools": [WEATHER, {**WEATHER, "name": "other"}], "store": False}
        items: list[Json] = [{"role": "user", "content": "Hi"}]
        _, response = await served.post({**asked, "input": items})
        call = response["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        if change == "forgotten":
            served.scheduler.store.recent_calls = RecentCalls()
        call |= {"another argument": {"arguments": '{"city":"Rome"}'}, "another function": {"name": "other"}}.get(
            change, {}
        )
        await served.post({**asked, "input": [*items, *response["output"], result]})
    (session,) = exported(folder, engine)
    reasons = [path.cut and path.cut.reason for path in session.paths]
    assert reasons == ([None] if change == "nothing" else [None, "template" if change == "forgotten" else "edit"])


async def test_choices_of_a_session_are_paths_of_one_prompt(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
        headers = {"X-Session-ID": "work"}
        async with served.client.post(f"{served.url}/v1/chat/completions", json=asked, headers=headers) as answer:
            assert answer.status == 200
    (session,) = exported(folder, engine)
    assert session.id == "work"
    one, other = session.paths
    assert one.token_ids == other.token_ids
    assert [path.mask.count(1) for path in session.paths] == [len(script(HELLO).token_ids)] * 2
    assert [(path.cut, path.branch) for path in session.paths] == [(None, None)] * 2


async def test_two_keys_with_one_session_id_are_two_sessions(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with recording_server(engine, folder, keys=Keys(None, KEYS)) as served:
        for key in KEYS:
            async with openai_client(served.url, key) as client:
                await client.responses.create(model="tiny", input="Hi", extra_body={"session_id": "work"})
    one, other = exported(folder, engine, sessions=2)
    assert (one.id, other.id) == ("work", "work")
    assert one.key != other.key
    assert not any(key in repr((one, other)) for key in KEYS)


async def test_other_instructions_are_named(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        _, first = await served.post({"input": "Hi"})
        await served.post({"input": "More", "previous_response_id": first["id"], "instructions": "Sing."})
    (session,) = exported(folder, engine)
    assert [path.cut and path.cut.reason for path in session.paths] == [None, "instructions"]


async def test_other_first_message_begins_anew(tmp_path: Path) -> None:
    """It shares the id of the session, and continues nothing: so it is no cut."""
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        for text in ("Hi", "Name this conversation."):
            await served.post({"input": text, "session_id": "work"})
    (session,) = exported(folder, engine)
    assert [path.cut for path in session.paths] == [None, None]


async def test_edit_of_a_result_is_named(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(Script(harmony_tokens(TALK[0]))), tmp_path / "recordings"
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    asked: Json = {"tools": [tool], "store": False, "session_id": "work"}
    async with recording_server(engine, folder) as served:
        items: list[Json] = [{"role": "user", "content": "Hi"}]
        for number in range(2):
            _, response = await served.post({**asked, "input": items})
            call_id = response["output"][-1]["call_id"]
            result = {"type": "function_call_output", "call_id": call_id, "output": f"a long result {number}"}
            items = [*items, *response["output"], result]
        (at,) = [at for at, item in enumerate(items) if item.get("output") == "a long result 0"]
        items[at] = {**items[at], "output": "cleared"}
        await served.post({**asked, "input": items})
    (session,) = exported(folder, engine)
    first, second = session.paths
    assert second.cut is not None
    assert second.cut.reason == "edit"
    (_, called), (_, read), _ = trained(session)
    assert (second.cut.response, second.cut.turn) == (read.response, read.number)
    assert called.end < second.cut.at < read.begin
    assert second.branch is not None
    assert (second.branch.path, second.branch.tokens) == (first.number, called.end)


async def test_items_that_no_longer_fit_are_a_truncation(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO), context_length=400), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        body: Json = {"input": "tea " * 150}
        for _ in range(3):
            status, response = await served.post({**body, "truncation": "auto", "max_output_tokens": 50})
            assert status == 200
            body = {"input": "more " * 60, "previous_response_id": response["id"]}
    (session,) = exported(folder, engine)
    assert "truncation" in [path.cut.reason for path in session.paths if path.cut]


async def test_result_of_a_call_that_the_server_made_is_what_the_model_read() -> None:
    (session,) = rollouts([HARMONY_CASES / "served_python"])
    (path,) = session.paths
    assert [[result.text for result in turn.results] for turn in path.turns] == [
        [],
        ["(The code wrote nothing.)"],
        ["42\n"],
    ]


@pytest.mark.parametrize(("is_stored", "again"), [(True, []), (False, ["20, 22"])])
async def test_results_of_calls_of_programs_are_none_that_the_model_read(
    tmp_path: Path, is_stored: bool, again: list[str]
) -> None:
    """It reads what the program printed, and again in a path that leaves the answer to it, whose thought is lost."""
    engine, folder = ScriptedEngine(), tmp_path / "recordings"
    look: Json = {"type": "function", "name": "look", "allowed_callers": ["direct", "programmatic"]}
    body: Json = {"tools": [look, {"type": "programmatic_tool_calling"}], "store": is_stored}
    program = ScriptedProgram([(NestedCall((None, "look"), "{}"),)] * 2)
    items: list[Json] = [{"role": "user", "content": "Hi"}]
    async with recording_server(engine, folder, toolbox=Toolbox({"program": program})) as served:
        for markup, result in ((python_markup("run()"), "20"), (HELLO, "22"), (HELLO, ""), (CALL, "rain"), (HELLO, "")):
            engine.script = script(markup.replace("get_weather", "look"))
            _, response = await served.post(body | {"input": items})
            more = [{"role": "user", "content": "More"}]
            if result:
                call_id = response["output"][-1]["call_id"]
                more = [{"type": "function_call_output", "call_id": call_id, "output": result}]
            items = more if is_stored else [*items, *response["output"], *more]
            body |= {"previous_response_id": response["id"]} if is_stored else {}
    session, _ = rollouts([folder])  # the other one has the response without a turn
    read = [[result.text for result in turn.results] for _, turn in trained(session)]
    assert read == [[], ["20, 22"], again, ["rain"]]


async def test_proxy_with_tokens_is_read(tmp_path: Path) -> None:
    """A server of another make has no ids of sessions: turns are joined by their tokens."""
    for prompt in (PROMPT, (*PROMPT, 4, 5, 6)):
        async with (
            token_upstream([[4], [5]], prompt=prompt) as upstream,
            recorded_server(upstream.url, tmp_path, asks_for_tokens=True) as url,
            aiohttp.ClientSession() as client,
        ):
            asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
            async with client.post(f"{url}/v1/chat/completions", json=asked) as answer:
                assert answer.status == 200
    (session,) = rollouts([tmp_path])
    (path,) = session.paths
    assert list(path.token_ids) == [*PROMPT, 4, 5, 6, 4, 5]
    assert list(path.mask) == [0, 0, 0, 1, 1, 0, 1, 1]
    assert {turn.response for turn in path.turns} == {folder.name for folder in recorded_folders(tmp_path)}


THRESHOLD = [{"type": "compaction", "compact_threshold": 50}]
SUMMARY = "<|channel|>final<|message|>Ann asked for tea.<|return|>"


async def test_compaction_cuts_before_and_after_its_summary(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        _, first = await served.post({"input": "I am Ann. " * 20})
        engine.turns = (script(SUMMARY), script(HELLO))
        more = {"input": "Tea?", "previous_response_id": first["id"], "context_management": THRESHOLD}
        status, second = await served.post(more)
        assert (status, [item["type"] for item in second["output"]]) == (200, ["compaction", "reasoning", "message"])
    (session,) = exported(folder, engine)
    assert [path.cut.reason if path.cut else "" for path in session.paths] == ["", "compaction", "compaction"]
    written = [sum(path.mask) for path in session.paths]
    assert written[0] == first["usage"]["output_tokens"]
    assert sum(written[1:]) == second["usage"]["output_tokens"]


async def test_request_that_names_an_unrecorded_response_continues_what_its_items_name(tmp_path: Path) -> None:
    """Codex resumes a session with all items, after a response that only warms the cache and so has no output."""
    engine, folder = ScriptedEngine(), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        answer: Json = {"output": []}
        names: list[str] = []
        for more in ([], [{"role": "user", "content": "Again."}]):
            engine.script = script(HELLO)
            _, warmed = await served.post({"input": "Be kind.", "session_id": "work"})
            engine.script = Script(harmony_tokens(TALK[2]))
            items = [{"role": "user", "content": "Hi"}, *answer["output"], *more]
            _, answer = await served.post({"input": items, "session_id": "work", "previous_response_id": warmed["id"]})
            names.append(warmed["id"])
    for name in names:
        shutil.rmtree(folder / name)
    (session,) = rollouts([folder])
    first, second = session.paths
    assert first.cut is None
    assert second.cut
    assert (second.cut.response, second.cut.reason) == (first.turns[0].response, "thoughts")


async def test_tokens_after_a_stop_text_are_left_out(tmp_path: Path) -> None:
    """The server reads no further, and counts none of them."""
    text = "<|channel|>final<|message|>One. STOP Two.<|return|>"
    weights = WeightSpan("1", 0, 2), WeightSpan("2", 2, 99)
    engine, folder = ScriptedEngine(script(text, chunk_size=100, weights=weights)), tmp_path / "recordings"
    async with recording_server(engine, folder) as served:
        _, answer = await served.post(
            {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stop": ["STOP"]},
            "/v1/chat/completions",
        )
    (session,) = exported(folder, engine)
    (path,) = session.paths
    (turn,) = path.turns
    assert sum(path.mask) == answer["usage"]["completion_tokens"]
    assert turn.left_out == len(script(text).token_ids) - sum(path.mask)
    assert turn.weights == (weights[0], WeightSpan("2", 2, sum(path.mask)))
    assert "Two" not in texts_of(path)


@asynccontextmanager
async def redacting_server(engine: ScriptedEngine, folder: Path) -> AsyncGenerator[ScriptedServer, None]:
    """Record behind a stage of the operator's that takes numbers out of texts."""
    taps = Recorder(folder, Header(FORMAT))
    stage = Rewrite(lambda text: re.sub(r"\d+", "#", text), held=re.compile(r"\d+"))

    def edit(pipeline: Any) -> Any:
        return taps.tapped(guarded(pipeline.insert_after("parse", "redact", stage), pipeline))

    database = str(folder.with_name("responses.sqlite3"))
    try:
        async with running_server(engine, database, edit=edit, closing=taps.closing) as served:
            yield served
    finally:
        await taps.close()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<|channel|>final<|message|>Hello.<|return|>", "<|channel|>final<|message|>Hello.<|return|>"),
        (
            "<|channel|>analysis<|message|>Sure.<|end|><|start|>assistant<|channel|>final<|message|>Dial 555<|return|>",
            "<|channel|>analysis<|message|>Sure.<|end|>",
        ),
        (
            "<|channel|>analysis<|message|>555?<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
            "",
        ),
    ],
)
async def test_changed_text_is_left_out_with_all_after_it(tmp_path: Path, text: str, kept: str) -> None:
    engine, folder = ScriptedEngine(script(text)), tmp_path / "recordings"
    async with redacting_server(engine, folder) as served:
        _, first = await served.post({"input": "Hi"})
        await served.post({"input": "More", "previous_response_id": first["id"]})
    (session,) = exported(folder, engine)
    tokens = script(text).token_ids
    for path, turn in trained(session):
        written = path.token_ids[turn.begin : turn.end]
        assert load_encoding().decode(written) == kept
        assert turn.left_out == len(tokens) - len(written)
    assert not any("555" in texts_of(path) for path in session.paths)


async def test_changed_output_needs_the_files_that_show_it(tmp_path: Path) -> None:
    engine, folder = ScriptedEngine(script(HELLO)), tmp_path / "recordings"
    async with redacting_server(engine, folder) as served:
        await served.post({"input": "Hi"})
    (recording,) = recorded_folders(folder)
    (recording / CHANGED_TURN).unlink()
    (session,) = rollouts([folder])
    assert [each.reason for each in session.skipped] == [
        "a stage of yours may have changed the output, and conversed.jsonl is missing"
    ]


async def test_cancelled_turn_keeps_what_it_wrote(tmp_path: Path) -> None:
    engine, folder = PacedEngine(script("<|channel|>final<|message|>" + "la " * 50)), tmp_path / "recordings"
    engine.hold(10)
    async with recording_server(engine, folder) as served:
        async with served.open_stream({"background": True}) as stream:
            response = await stream.response_id()
            await stream.upto(b"output_text.delta")
            await served.cancel(response)
        ended = await served.wait_for_end(response)
    (session,) = exported(folder, engine)
    assert [turn.stop for _, turn in trained(session)] == ["cancelled"]
    assert sum(session.paths[0].mask) == ended["usage"]["output_tokens"]
