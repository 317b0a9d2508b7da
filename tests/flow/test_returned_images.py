"""Images that tools of MCP servers return: a model that sees is shown them, as it is those of a function."""

from __future__ import annotations

from typing import Any

import mcp_types
import pytest

from penstock.extensions.tools.mcp.client import outcome_of
from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.services.mcp_config import SecretMask
from penstock.services.tools import ToolResult
from penstock.stages.converse.transcript import Transcript
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.render.chat.render import RenderChat
from penstock.stages.render.harmony.render import RenderHarmony
from tests.support.chat_templates import model_with_images, vocabulary
from tests.support.mcp_tools import PIXEL
from tests.support.scripted_tools import conversation

URL = f"data:image/png;base64,{PIXEL}"
IMAGE = mcp_types.ImageContent(data=PIXEL, mime_type="image/png")
BLOB = mcp_types.EmbeddedResource(
    resource=mcp_types.BlobResourceContents(uri="memo://one", blob=PIXEL, mime_type="image/png")
)
SVG = mcp_types.ImageContent(data="PHN2Zy8+", mime_type="image/svg+xml")
TEXT = mcp_types.TextContent(text="Found.")
N: dict[str, Any] = {"structured_content": {"n": 1}}


@pytest.mark.parametrize(
    ("content", "fields", "text", "images"),
    [
        ([TEXT, IMAGE], {}, "Found.\n[image: image/png]", (URL,)),
        ([IMAGE, IMAGE], {}, "[image: image/png]\n[image: image/png]", (URL, URL)),
        ([BLOB], {}, "[resource: memo://one, image/png]", (URL,)),
        ([BLOB], N, '[resource: memo://one, image/png]\n{"n":1}', (URL,)),
        ([IMAGE], N, '[image: image/png]\n{"n":1}', (URL,)),
        ([TEXT, IMAGE], N, "Found.\n[image: image/png]", (URL,)),
        ([SVG], {}, "[image: image/svg+xml]", ()),
    ],
)
def test_results_have_a_text_and_images(content: Any, fields: Any, text: str, images: tuple[str, ...]) -> None:
    result = mcp_types.CallToolResult(content=content, **fields)
    assert outcome_of(result, SecretMask(())) == ToolResult(text, images=images)


def after_call(*images: str) -> frames.ResolvedRequest:
    """A conversation after a call that has returned images."""
    request = conversation()
    transcript = Transcript(request.facts)
    transcript.feed(frames.ResponseStarted(request.facts))
    transcript.feed(frames.McpCallOpened("docs", "look"))
    transcript.feed(frames.ItemDelta("{}"))
    transcript.feed(frames.CallStarted())
    transcript.feed(frames.CallFinished("[image: image/png]", images=images))
    transcript.feed(frames.ItemClosed(complete=True))
    return transcript.continued(request)


async def rendered(stage: Any, request: frames.ResolvedRequest) -> frames.Prompt:
    (prompt,) = [prompt async for prompt in stage(source_of([request]))]
    return prompt  # type: ignore[no-any-return]


async def test_a_model_that_sees_is_shown_the_images_of_a_call() -> None:
    prompt = await rendered(RenderChat(model_with_images(), 10_000), after_call(URL, URL))
    assert prompt.images == (URL, URL)
    assert "tool\n[image: image/png]<image><image><|im_end|>" in vocabulary().decode(prompt.token_ids)


@pytest.mark.parametrize("name", ["gpt-oss", "blind"])
async def test_a_model_of_text_reads_the_placeholder(name: str) -> None:
    encoding = load_encoding()
    stage: Any = RenderHarmony(encoding) if name == "gpt-oss" else RenderChat(model_with_images(sees=False), 10_000)
    prompt = await rendered(stage, after_call(URL))
    assert prompt.images == ()
    text = encoding.decode(prompt.token_ids) if name == "gpt-oss" else vocabulary().decode(prompt.token_ids)
    assert text.count("[image: image/png]") == 1


async def test_images_of_calls_that_the_engine_refuses_are_left_out() -> None:
    request = frames.replace(after_call(URL), unseen={URL: "It is broken."})
    prompt = await rendered(RenderChat(model_with_images(), 10_000), request)
    assert prompt.images == ()
    assert "[image: image/png]" in vocabulary().decode(prompt.token_ids)
