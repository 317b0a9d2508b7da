"""Parts of a conversation that cannot be read: refused if the client sends them now, else a sentence for the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from PIL import Image

from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.image_decoding import decoded
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.chat.model import ChatModel
from tests.support.api_clients import openai_client
from tests.support.chat_templates import model_with_images, vocabulary
from tests.support.documents import as_base64
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.tool_servers import data_url, png

pytestmark = pytest.mark.io

Json: TypeAlias = Any

# What cannot be read


@dataclass(frozen=True)
class Part:
    """A part of a conversation, with the reason that the model reads; ``of_text`` is that of a model without eyes."""

    kind: str
    source: str
    value: str
    reason: str
    of_text: str = ""

    def sentence(self, *, sees: bool) -> str:
        reason = self.reason if sees else self.of_text or self.reason
        match self.kind:
            case "image":
                return f"[The image cannot be shown: {reason}"
            case "audio":
                return f"[The audio cannot be heard: {reason}"
            case _:
                return f"[The file 'a.bin' cannot be read: {reason}"


BLIND = "this model reads text only.]"
GONE = "it was deleted, or there never was such a file.]"
NOWHERE = "http://127.0.0.1:1/a"
CUT = png(width=99, height=99)[:-30]

PARTS = {
    "image": Part("image", "data", data_url(png()), "", BLIND),
    "broken image": Part("image", "data", data_url(CUT), "it cannot be read: its content is malformed.]", BLIND),
    "svg": Part("image", "data", data_url(b"<svg/>", "image/svg+xml"), "its type is not image/png", BLIND),
    "no base64": Part("image", "data", "data:image/png;base64,%%%", "it is not valid base64.]", BLIND),
    "no image": Part("image", "data", data_url(b"words"), "it is not a PNG, JPEG, WebP or GIF.]", BLIND),
    "dead image": Part("image", "url", NOWHERE, "the image at http://127.0.0.1:1/a could not be fetched.", BLIND),
    "deleted image": Part("image", "id", "file-none", GONE),
    "pdf": Part("file", "data", "data:application/pdf;base64," + as_base64(b"%PDF-1.4 x"), "it is no valid PDF.]"),
    "archive": Part("file", "data", "data:application/zip;base64," + as_base64(b"PK\x03\x04"), "it is a damaged"),
    "rtf": Part("file", "data", "data:text/rtf;base64," + as_base64(b"{\\rtf1 x}"), "it is RTF.]"),
    "dead file": Part("file", "url", NOWHERE, "http://127.0.0.1:1/a could not be fetched."),
    "deleted file": Part("file", "id", "file-none", GONE),
    "audio": Part("audio", "data", as_base64(b"RIFF"), "this server does not hear.]"),
}

IN_EVERY_PLACE = ("image", "deleted image", "deleted file", "rtf", "audio")
"""Parts of each kind and source, which are tried in every place; each other one, which takes longer, in one of them."""

# How the dialects write it


def of_responses(part: Part) -> Json:
    match part.kind, part.source:
        case "audio", _:
            return {"type": "input_audio", "input_audio": {"data": part.value, "format": "wav"}}
        case "image", "id":
            return {"type": "input_image", "file_id": part.value}
        case "image", _:
            return {"type": "input_image", "image_url": part.value}
        case _, source:
            return {"type": "input_file", "filename": "a.bin", f"file_{source}": part.value}


def of_chat(part: Part) -> Json | None:
    match part.kind, part.source:
        case "image", "id":
            return None
        case "image", _:
            return {"type": "image_url", "image_url": {"url": part.value}}
        case "file", source:
            return {"type": "file", "file": {"filename": "a.bin", f"file_{source}": part.value}}
        case _:
            return of_responses(part)


def of_messages(part: Part) -> Json | None:
    if part.kind == "audio":
        return None
    match part.source:
        case "id":
            source: Json = {"type": "file", "file_id": part.value}
        case "url":
            source = {"type": "url", "url": part.value}
        case _:
            head, _, data = part.value.partition(";base64,")
            source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    return (
        {"type": "image", "source": source}
        if part.kind == "image"
        else {
            "type": "document",
            "title": "a.bin",
            "source": source,
        }
    )


Place: TypeAlias = Callable[[Json], list[Json]]


def user(*content: Json) -> Json:
    return {"role": "user", "content": list(content) if content else "Go on."}


def called(kind: str, **fields: Json) -> Callable[[Json], list[Json]]:
    return lambda part: [{"type": kind, "call_id": "c", **fields}, {"type": f"{kind}_output", "call_id": "c"} | part]


SAID = {"role": "assistant", "content": "I saw it."}
TEXT = {"type": "input_text", "text": "What is it?"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT_CALLED = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
FUNCTION = called("function_call", name="f", arguments="{}")
CUSTOM = called("custom_tool_call", name="f", input="x")


def result(part: Json) -> Json:
    return {"type": "tool_result", "tool_use_id": "c", "content": [part]}


@dataclass(frozen=True)
class Form:
    """A dialect: where its bodies have the conversation, how it writes a part, and the places that a part may have."""

    path: str
    counts: str
    key: str
    write: Callable[[Part], Json | None]
    places: dict[str, Place]
    text: Json
    fields: Json = field(default_factory=dict)

    def body(self, conversation: list[Json]) -> Json:
        return {"model": "tiny", self.key: conversation, **self.fields}


FORMS = {
    "responses": Form(
        "/v1/responses",
        "/v1/responses/input_tokens",
        "input",
        of_responses,
        {
            "output": lambda part: [user(), *FUNCTION({"output": [part]})],
            "custom output": lambda part: [user(), *CUSTOM({"output": [TEXT, part]})],
            "output before a message": lambda part: [user(), *FUNCTION({"output": [part]}), user()],
            "beside an output": lambda part: [user(), *FUNCTION({"output": "x"}), user(part)],
            "earlier turn": lambda part: [user(TEXT, part), SAID, user()],
            "of the developer": lambda part: [{"role": "developer", "content": [part]}, user(), SAID, user()],
        },
        TEXT,
    ),
    "chat": Form(
        "/v1/chat/completions",
        "",
        "messages",
        of_chat,
        {
            "output": lambda part: [user(), CHAT_CALLED, {"role": "tool", "tool_call_id": "c", "content": [part]}],
            "beside an output": lambda part: [
                user(),
                CHAT_CALLED,
                {"role": "tool", "tool_call_id": "c", "content": "See below."},
                user(part),
            ],
            "earlier turn": lambda part: [user(part), SAID, user()],
        },
        {"type": "text", "text": "What is it?"},
    ),
    "messages": Form(
        "/v1/messages",
        "/v1/messages/count_tokens",
        "messages",
        of_messages,
        {
            "output": lambda part: [user(), USED, user(result(part))],
            "beside an output": lambda part: [user(), USED, user(result({"type": "text", "text": "See below."}), part)],
            "output in an earlier turn": lambda part: [user(), USED, user(result(part)), SAID, user()],
            "earlier turn": lambda part: [user(part), SAID, user()],
        },
        {"type": "text", "text": "What is it?"},
        {"max_tokens": 100},
    ),
}


class LookingEngine(ScriptedEngine):
    """A scripted engine that decodes the images of a prompt, as vLLM does."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        await decoded(prompt.images, lambda image: Image.open(BytesIO(image)).load())
        async with super().open(prompt) as frames:
            yield frames


def model(name: str) -> ChatModel | None:
    if name == "gpt-oss":
        return None
    return model_with_images(sees=name == "seeing")


@asynccontextmanager
async def serving(name: str, where: Path) -> AsyncGenerator[ScriptedServer, None]:
    chat = model(name)
    spoken = Script(chat.vocabulary.encode("Hello.<|im_end|>")) if chat else script(HELLO)
    async with running_server(LookingEngine(spoken), where, model=chat, resources=["files"]) as served:
        yield served


def prompt_of(served: ScriptedServer, name: str) -> str:
    return served.prompt_text() if name == "gpt-oss" else vocabulary().decode(served.engine.prompts[-1].token_ids)


MODELS = ("gpt-oss", "blind", "seeing")


def cases(form: Form, name: str) -> Iterator[tuple[str, Part, Json]]:
    for label, part in PARTS.items():
        is_readable = name == "seeing" and not part.reason
        if not is_readable and (written := form.write(part)) is not None:
            yield label, part, written


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
async def test_history_never_refuses_a_turn(tmp_path: Path, form: Form, name: str) -> None:
    async with serving(name, tmp_path) as served:
        places = list(form.places.items())
        for number, (label, part, written) in enumerate(cases(form, name)):
            for place, laid_out in places if label in IN_EVERY_PLACE else [places[number % len(places)]]:
                body = form.body(laid_out(written))
                status, answer = await served.post(body, form.path)
                assert status == 200, (label, place, answer)
                sentence = part.sentence(sees=name == "seeing")
                assert sentence in prompt_of(served, name), (label, place)
                if form.counts:
                    counted = {key: value for key, value in body.items() if key != "max_tokens"}
                    assert (await served.post(counted, form.counts))[0] == 200, (label, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
async def test_what_is_said_now_is_refused_with_its_place(tmp_path: Path, form: Form, name: str) -> None:
    async with serving(name, tmp_path) as served:
        for label, part, written in cases(form, name):
            for before in ([], [user(), SAID]):
                status, answer = await served.post(form.body([*before, user(form.text, written)]), form.path)
                assert status in ((400, 404) if part.source == "id" else (400,)), (label, answer)
                error = answer["error"]
                where = error.get("param") or error["message"].partition("(at ")[2]
                assert where.startswith(form.key) or where == "input", (label, error)
        assert served.engine.prompts == []


async def test_stored_history_never_refuses_a_turn(tmp_path: Path) -> None:
    """A response of a model that sees is continued with one that does not, once the file is gone."""
    async with serving("seeing", tmp_path) as served:
        async with openai_client(served.url) as sdk:
            upload = (await sdk.files.create(file=("a.txt", b"Sun."), purpose="user_data")).id
        parts = [of_responses(PARTS["image"]), {"type": "input_file", "file_id": upload}]
        items: list[Json] = [user(*parts)]
        _, first = await served.post({"input": items})
        path = await served.create_conversation(*items)
        _, listed = await served.get(f"/v1/responses/{first['id']}/input_items")
        assert listed["data"][0]["content"] == [{**parts[0], "detail": "auto"}, parts[1]]
        await served.delete(f"/v1/files/{upload}")
    async with serving("gpt-oss", tmp_path) as served:
        for more in (
            {"input": "Go on.", "previous_response_id": first["id"]},
            {"input": "Go on.", "conversation": path.rpartition("/")[2]},
            {"input": [{"type": "item_reference", "id": listed["data"][0]["id"]}]},
        ):
            status, answer = await served.post(more)
            assert status == 200, answer
            text = prompt_of(served, "gpt-oss")
            assert f"[The image cannot be shown: {BLIND}\n[The file 'file' cannot be read: {GONE}" in text
