"""Stored files in requests of all dialects, by their ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client
from tests.support.documents import pdf
from tests.support.server import HELLO, ScriptedServer, running_server, script

Json = dict[str, Any]

REPORT = pdf(["Sales rose.", "Costs fell."])
READ = '<file name="report.pdf">\n[page 1]\nSales rose.\n\n[page 2]\nCosts fell.\n</file>\n'
UPLOAD = ("report.pdf", REPORT, "application/pdf")
ASKED: Any = {"type": "input_text", "text": "Sum up."}


def user(*parts: Any) -> Any:
    return {"role": "user", "content": list(parts)}


def part(file_id: str) -> Any:
    return {"type": "input_file", "file_id": file_id}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), tmp_path, resources=["files"]) as served:
        yield served


@pytest.fixture
async def file_id(sdk: openai.AsyncOpenAI) -> str:
    made = await sdk.files.create(file=UPLOAD, purpose="user_data")
    return str(made.id)


async def test_responses_read_a_stored_file_and_keep_its_id(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, file_id: str
) -> None:
    first = await sdk.responses.create(model="tiny", input=[user(part(file_id), ASKED)])
    assert READ + "Sum up." in served.prompt_text()
    kept = await sdk.responses.input_items.list(first.id)
    assert kept.data[0].to_dict()["content"] == [part(file_id), ASKED]
    await sdk.responses.create(model="tiny", input="And costs?", previous_response_id=first.id)
    assert READ in served.prompt_text()
    counted = await sdk.responses.input_tokens.count(model="tiny", input=[user(part(file_id), ASKED)])
    assert counted.input_tokens > 30


async def test_outputs_of_functions_have_stored_files(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, file_id: str
) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [part(file_id)]}
    await sdk.responses.create(model="tiny", input=[user(ASKED), call, output])
    assert "Costs fell." in served.prompt_text()


async def test_chats_read_a_stored_file(served: ScriptedServer, sdk: openai.AsyncOpenAI, file_id: str) -> None:
    file: Any = {"type": "file", "file": {"file_id": file_id}}
    await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [file]}])
    assert READ in served.prompt_text()


async def test_messages_read_a_stored_file(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    made = await claude.beta.files.upload(file=UPLOAD)
    source: Any = {"type": "document", "source": {"type": "file", "file_id": made.id}}
    asked: Any = [{"role": "user", "content": [source, {"type": "text", "text": "Sum up."}]}]
    await claude.beta.messages.create(max_tokens=100, model="tiny", messages=asked, betas=["files-api-2025-04-14"])
    assert READ + "Sum up." in served.prompt_text()
    await claude.beta.files.delete(made.id)
    with pytest.raises(anthropic.NotFoundError, match=r"No such File object.*\(at messages\[0\].content\[0\]\)"):
        await claude.messages.create(max_tokens=100, model="tiny", messages=asked)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": [user(ASKED, part("file-none"))]}, "input[0].content[1].file_id"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-none"}}]}]},
            "messages[0].content[0].file_id",
        ),
        ("/v1/conversations", {"items": [user(ASKED, part("file-none"))]}, "items[0].content[1].file_id"),
    ],
)
async def test_unknown_id_is_a_404_with_its_place(served: ScriptedServer, path: str, body: Json, param: str) -> None:
    status, answer = await served.post(body, path)
    assert (status, answer["error"]["message"]) == (404, "No such File object: file-none")
    assert answer["error"]["param"] == param
    assert served.engine.prompts == []


async def test_deleted_file_leaves_its_conversation_readable(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, file_id: str
) -> None:
    first = await sdk.responses.create(model="tiny", input=[user(part(file_id), ASKED)])
    conversation = await sdk.conversations.create(items=[user(part(file_id))])
    await sdk.files.delete(file_id)
    for field, value in (("previous_response_id", first.id), ("conversation", conversation.id)):
        assert (await served.post({"input": "And costs?", field: value}))[0] == 200
        assert "cannot be read: it was deleted, or there never was such a file.]" in served.prompt_text()
    assert (await served.get(f"/v1/responses/{first.id}/input_items"))[0] == 200


async def test_file_of_another_key_is_not_found(tmp_path: Path) -> None:
    keys = Keys(given=["key-of-ann-0000000000", "key-of-bob-0000000000"])
    engine = ScriptedEngine(script(HELLO))
    async with running_server(engine, tmp_path, resources=["files"], keys=keys) as served:
        ann, bob = (openai_client(served.url, f"key-of-{name}-0000000000") for name in ("ann", "bob"))
        async with ann, bob:
            made = await ann.files.create(file=UPLOAD, purpose="user_data")
            await ann.responses.create(model="tiny", input=[user(part(made.id))])
            with pytest.raises(openai.NotFoundError, match="No such File object"):
                await bob.responses.create(model="tiny", input=[user(part(made.id))])


async def test_stored_file_that_cannot_be_read_is_a_400(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.files.create(file=("a.zip", b"PK\x03\x04"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match=r"'a\.zip' cannot be read\. It is a damaged archive") as refused:
        await sdk.responses.create(model="tiny", input=[user(part(made.id))])
    assert refused.value.param == "input[0].content[0]"


async def test_stored_file_may_be_larger_than_what_a_model_reads(
    served: ScriptedServer, sdk: openai.AsyncOpenAI
) -> None:
    made = await sdk.files.create(file=("a.txt", b"a" * (33 << 20)), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="larger than 33,554,432 bytes"):
        await sdk.responses.create(model="tiny", input=[user(part(made.id))])
