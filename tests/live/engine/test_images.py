from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from fixtures.tiny_sight.build import TOKENS_PER_IMAGE, build
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import ContextTooLong, InvalidPrompt, InvalidRequest
from penstock.pipeline.frames import GenerationFinished, Prompt, Sampling, TokenChunk
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.tap import Tap
from penstock.services.engines.vllm import VllmEngine, plan_vllm
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.services.web.image_cache import ImageCache
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.stages.models.chat.load import ChatOptions, load_chat_model
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.responses import chat_stages, responses_pipeline
from tests.support.engine_requests import ON_SHARED_ENGINE, prompt
from tests.support.event_streams import final, generate, run_request
from tests.support.paths import ROOT
from tests.support.stores import open_store
from tests.support.tool_servers import BLUE, LOOPBACK, RED, Gallery, data_url, png, web_server

pytestmark = ON_SHARED_ENGINE

Json = dict[str, Any]

CHECKPOINT = ROOT / ".cache" / "tiny_sight"
CONTEXT_LENGTH = 512
MOST_IMAGES = 5
ARGUMENTS = (
    "--served-model-name=tiny-sight",
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={CONTEXT_LENGTH}",
    "--max-num-seqs=8",
    "--kv-cache-memory-bytes=33554432",
    f'--limit-mm-per-prompt={{"image": {MOST_IMAGES}}}',
)
RED_URL, BLUE_URL = data_url(png(RED)), data_url(png(BLUE))


@dataclass
class Seeing:
    """A vision model, the whole pipeline around it, and the frames that passed the engine."""

    engine: VllmEngine
    chat: ChatModel
    store: Store = field(default_factory=lambda: Store(NullDatabase()))
    prompts: Tap = field(default_factory=Tap)
    generated: Tap = field(default_factory=Tap)

    def pipeline(self, allowed: AllowedNetworks) -> Pipeline[CreateResponse, ResponseEvent]:
        live = RunRegistry(self.store)
        whole = responses_pipeline(chat_stages(self.chat, ImageCache(allowed)), self.engine, live)
        return whole.insert_after("render", "prompts", self.prompts).insert_after(
            "generate", "generated", self.generated
        )

    async def answer(self, *parts: Json, allowed: AllowedNetworks = NOTHING_ALLOWED, **body: Any) -> Response:
        """Send a message of these parts; check every event, and return the response."""
        wanted: Json = {"input": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_output_tokens": 16}
        return final(await run_request(self.pipeline(allowed), wanted | {"top_logprobs": 2} | body))

    def first(self) -> float:
        chunks = [frame for frame in self.generated.frames if isinstance(frame, TokenChunk)]
        self.generated.frames.clear()
        return chunks[0].logprobs[0].logprob


def alike(one: float, other: float) -> bool:
    """Return True if two log probabilities are equal, up to the differences that caching causes."""
    return abs(one - other) < 1e-4


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def loaded() -> AsyncGenerator[tuple[VllmEngine, ChatModel], None]:
    plan = plan_vllm(str(build(CHECKPOINT)), ARGUMENTS)
    chat = load_chat_model(plan.config, ChatOptions())
    engine = plan.start()
    yield engine, chat
    await engine.close()


@pytest.fixture
def seeing(loaded: tuple[VllmEngine, ChatModel]) -> Seeing:
    return Seeing(*loaded)


def text(content: str = "What is this?") -> Json:
    return {"type": "input_text", "text": content}


def image(url: str = RED_URL) -> Json:
    return {"type": "input_image", "image_url": url}


def input_tokens_of(response: Response) -> int:
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return response.usage.input_tokens


async def test_image_tokens_are_counted_by_the_engine(seeing: Seeing) -> None:
    assert seeing.chat.sees_images
    without = input_tokens_of(await seeing.answer(text()))
    for count in (1, 2, MOST_IMAGES):
        assert input_tokens_of(await seeing.answer(text(), *[image()] * count)) == without + count * TOKENS_PER_IMAGE


async def test_answer_depends_on_the_image(seeing: Seeing) -> None:
    likely = []
    for parts in ([image(RED_URL)], [image(BLUE_URL)], [], [image(RED_URL)], [image(RED_URL), image(BLUE_URL)]):
        await seeing.answer(text(), *parts)
        likely.append(seeing.first())
    assert alike(likely[0], likely.pop(3))
    assert not any(alike(*pair) for pair in combinations(likely, 2))
    await seeing.answer(text(), image(BLUE_URL), image(RED_URL))
    assert not alike(seeing.first(), likely[3]), "the order of images does not matter to it"


async def test_fetched_image_equals_its_data_url(seeing: Seeing) -> None:
    gallery = Gallery()
    async with web_server(gallery.show) as url:
        shown = input_tokens_of(await seeing.answer(text(), image(f"{url}/a.png"), allowed=LOOPBACK))
        assert gallery.seen == ["/a.png"]
    fetched = seeing.first()
    assert input_tokens_of(await seeing.answer(text(), image())) == shown
    assert alike(seeing.first(), fetched)


async def test_image_in_a_tool_output_is_seen(seeing: Seeing) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    history = [{"role": "user", "content": "Look."}, call]
    output = {"type": "function_call_output", "call_id": "c"}
    likely = []
    for url in (RED_URL, BLUE_URL):
        await seeing.answer(input=[*history, output | {"output": [image(url)]}])
        likely.append(seeing.first())
        assert seeing.prompts.frames[-1].images == (url,)
    assert not alike(*likely)


async def test_stored_image_is_seen_again(seeing: Seeing, tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        seeing.store = store
        first = await seeing.answer(text(), image())
        await seeing.answer(text("And now?"), previous_response_id=first.id)
    assert seeing.prompts.frames[-1].images == (RED_URL,)


async def test_salt_separates_prompts_with_images(seeing: Seeing) -> None:
    long = text("What is this? " * 20)
    salted = [await seeing.answer(long, image(), cache_salt=salt) for salt in ("a", "a", "b")]
    cached = [response.usage.input_tokens_details.cached_tokens for response in salted if response.usage]
    assert cached[1] > cached[0] == cached[2]
    assert len({input_tokens_of(response) for response in salted}) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "http://localhost:{port}/a.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://allowed.example:{port}/to?url=http://127.0.0.2:{port}/a.png",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
    ],
)
async def test_forbidden_image_url_never_reaches_the_engine(url: str, seeing: Seeing) -> None:
    gallery = Gallery()
    async with web_server(gallery.show) as server:
        with pytest.raises(InvalidRequest) as refused:
            await seeing.answer(text(), image(url.format(port=server.rpartition(":")[2])))
    assert refused.value.status == 400
    assert (seeing.prompts.frames, gallery.seen) == ([], [])


async def test_redirect_of_an_image_is_checked(seeing: Seeing) -> None:
    gallery = Gallery()
    async with web_server(gallery.show) as url:
        inside = url.replace("127.0.0.1", "127.0.0.2")
        with pytest.raises(InvalidRequest, match="address is not allowed"):
            await seeing.answer(
                text(), image(f"{url}/to?url={inside}/a.png"), allowed=AllowedNetworks.parse(["127.0.0.1"])
            )
    assert (seeing.prompts.frames, gallery.seen) == ([], ["/to"])


async def test_unusable_images_are_client_errors(seeing: Seeing) -> None:
    with pytest.raises(InvalidRequest, match=f"At most {MOST_IMAGES}") as many:
        await seeing.answer(text(), *[image()] * (MOST_IMAGES + 1))
    with pytest.raises(InvalidPrompt, match="Image 2 cannot be read") as broken:
        await seeing.answer(text(), image(), image(data_url(png(width=99, height=99)[:-30])))
    overhead = input_tokens_of(await seeing.answer(text(""))) + MOST_IMAGES
    with pytest.raises(ContextTooLong) as long:
        await seeing.answer(text("x" * (CONTEXT_LENGTH - overhead - 5)), *[image()] * MOST_IMAGES)
    assert [refused.value.param for refused in (many, broken, long)] == ["input"] * 3
    assert (await seeing.answer(text(), image())).status in ("completed", "incomplete")


async def test_image_without_a_placeholder_is_refused(seeing: Seeing) -> None:
    """An image is never dropped silently if the prompt has no placeholder for it."""
    await seeing.answer(text(), image())
    (wanted,) = seeing.prompts.frames
    for token_ids, images in (((1, 2, 3), (RED_URL,)), (wanted.token_ids, (RED_URL, BLUE_URL))):
        with pytest.raises(InvalidPrompt, match="no place for an image") as refused:
            await generate(seeing.engine, prompted(wanted, token_ids, images))
        assert refused.value.param == "input"


def prompted(wanted: Prompt, token_ids: Sequence[int], images: tuple[str, ...]) -> Prompt:
    return Prompt(replace(wanted.facts, input=(), sampling=Sampling(0.0, 1.0, 3)), tuple(token_ids), (), images=images)


@pytest.mark.defect("V14")
async def test_text_model_refuses_images(engine: VllmEngine) -> None:
    wanted = prompt("Say hello.", max_tokens=3)
    with pytest.raises(InvalidPrompt, match="reads text only"):
        await generate(engine, prompted(wanted, wanted.token_ids, (RED_URL,)))
    *_, end = await generate(engine, wanted)
    assert isinstance(end, GenerationFinished)
    assert end.prompt_tokens is None
