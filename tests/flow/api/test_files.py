"""Files in requests of all dialects, sent by the SDKs: the model reads their text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from penstock.extensions.tools.files.file_reader import FileReader
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.responses import reading_files
from tests.support.documents import as_base64, docx, paragraph, pdf
from tests.support.server import HELLO, ScriptedServer, running_server, script
from tests.support.tool_servers import LOOPBACK, web_server

Json = dict[str, Any]

REPORT = pdf(["Sales rose.", "Costs fell."])
DATA = f"data:application/pdf;base64,{as_base64(REPORT)}"
READ = '<file name="report.pdf">\n[page 1]\nSales rose.\n\n[page 2]\nCosts fell.\n</file>\n'
FILE: Any = {"type": "input_file", "filename": "report.pdf", "file_data": DATA}
ASKED: Any = {"type": "input_text", "text": "Sum up."}
BROKEN = f"data:application/pdf;base64,{as_base64(b'%PDF-1.4')}"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    def edit(pipeline: Any) -> Any:
        return reading_files(pipeline, FileReader(allowed=LOOPBACK))

    async with running_server(ScriptedEngine(script(HELLO)), tmp_path, edit=edit) as served:
        yield served


async def test_responses_read_a_file_and_keep_it_for_the_next_turn(
    served: ScriptedServer, sdk: openai.AsyncOpenAI
) -> None:
    first = await sdk.responses.create(model="tiny", input=[{"role": "user", "content": [FILE, ASKED]}])
    assert READ + "Sum up." in served.prompt_text()
    assert first.usage
    kept = await sdk.responses.input_items.list(first.id)
    assert kept.data[0].to_dict()["content"] == [FILE, ASKED]
    await sdk.responses.create(model="tiny", input="And costs?", previous_response_id=first.id)
    assert READ in served.prompt_text()
    plain = await sdk.responses.input_tokens.count(model="tiny", input="Sum up.")
    counted = await sdk.responses.input_tokens.count(model="tiny", input=[{"role": "user", "content": [FILE, ASKED]}])
    assert counted.input_tokens > plain.input_tokens + 15


async def test_chat_completions_read_a_file(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    part: Any = {"type": "file", "file": {"filename": "report.pdf", "file_data": DATA}}
    asked: Any = {"type": "text", "text": "Sum up."}
    await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part, asked]}])
    assert READ + "Sum up." in served.prompt_text()


async def test_messages_read_documents(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    source: Any = {"type": "base64", "media_type": "application/pdf", "data": as_base64(REPORT)}
    document: Any = {"type": "document", "title": "report.pdf", "source": source}
    asked: Any = {"type": "text", "text": "Sum up."}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [document]}
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    tool: Any = {"name": "read", "input_schema": {"type": "object"}}
    for messages in (
        [{"role": "user", "content": [document, asked]}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    ):
        given: Any = messages
        await claude.messages.create(model="tiny", max_tokens=100, messages=given, tools=[tool])
        assert READ in served.prompt_text()


async def test_a_file_on_the_web_is_fetched(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    async def show(_: web.Request) -> web.Response:
        return web.Response(body=docx(paragraph("Sales rose.")))

    async with web_server(show) as url:
        part: Any = {"type": "input_file", "file_url": f"{url}/report.docx"}
        await sdk.responses.create(model="tiny", input=[{"role": "user", "content": [part]}])
        read = '<file name="report.docx">\nSales rose.\n</file>\n'
        assert read in served.prompt_text()
        block: Any = {"type": "document", "source": {"type": "url", "url": f"{url}/report.docx"}}
        await claude.messages.create(model="tiny", max_tokens=100, messages=[{"role": "user", "content": [block]}])
        assert read in served.prompt_text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [ASKED, FILE | {"file_data": BROKEN}]}]},
            "input[0].content[1]",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {
                        "role": "user",
                        "content": [{"type": "file", "file": {"filename": "report.pdf", "file_data": BROKEN}}],
                    },
                ]
            },
            "messages[1].content[0]",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 100,
                "model": "tiny",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "title": "report.pdf",
                                "source": {"type": "base64", "media_type": "application/pdf", "data": BROKEN[28:]},
                            }
                        ],
                    }
                ],
            },
            "messages[0].content[0]",
        ),
    ],
    ids=["responses", "chat", "messages"],
)
async def test_an_unreadable_file_is_a_400_with_its_place(
    served: ScriptedServer, path: str, body: Json, param: str, stream: bool
) -> None:
    status, answer = await served.post(body | {"stream": stream}, path)
    assert status == 400
    assert "The file 'report.pdf' cannot be read. It is no valid PDF" in answer["error"]["message"]
    assert param in (answer["error"].get("param"), answer["error"]["message"].partition("(at ")[2].rstrip(")"))
    assert served.engine.prompts == []


async def test_a_background_response_is_refused_before_it_is_stored(
    served: ScriptedServer, sdk: openai.AsyncOpenAI
) -> None:
    part: Any = FILE | {"file_data": BROKEN}
    with pytest.raises(openai.BadRequestError, match="no valid PDF"):
        await sdk.responses.create(model="tiny", background=True, input=[{"role": "user", "content": [part]}])


async def test_a_conversation_keeps_a_file(served: ScriptedServer, sdk: openai.AsyncOpenAI) -> None:
    item: Any = {"type": "message", "role": "user", "content": [FILE]}
    conversation = await sdk.conversations.create(items=[item])
    await sdk.responses.create(model="tiny", conversation=conversation.id, input="Sum up.")
    assert READ in served.prompt_text()
