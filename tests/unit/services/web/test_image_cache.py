"""Images from the web: which are fetched, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.services.web import image_cache as fetching
from penstock.services.web.image_cache import ImageCache
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.stages.models import images as limits
from penstock.stages.models.images import NoImage
from tests.support.tool_servers import BLUE, IMAGES, LOOPBACK, Gallery, data_url, png, web_server

pytestmark = pytest.mark.io

PICTURE = data_url(png())


@pytest.fixture
def gallery() -> Gallery:
    return Gallery()


@pytest.fixture
async def url(gallery: Gallery) -> AsyncIterator[str]:
    async with web_server(gallery.show) as url:
        yield url


async def refusal(url: str, allowed: AllowedNetworks = LOOPBACK) -> str:
    """The message of the 400 for a refused URL, which is the reason if the image is optional."""
    with pytest.raises(InvalidRequest) as refused:
        await ImageCache(allowed).resolve_all([url])
    assert (refused.value.status, refused.value.param) == (400, "input")
    (reason,) = await ImageCache(allowed).resolve_all([url], {url})
    assert isinstance(reason, NoImage)
    assert str(reason) == refused.value.message
    return refused.value.message


@pytest.mark.parametrize("kind", IMAGES)
async def test_fetched_image_becomes_a_data_url(kind: str, url: str) -> None:
    assert await ImageCache(LOOPBACK).resolve(f"{url}/{kind.partition('/')[2]}") == data_url(IMAGES[kind], kind)


async def test_data_url_is_kept() -> None:
    assert await ImageCache(NOTHING_ALLOWED).resolve(PICTURE) == PICTURE


async def test_bytes_decide_the_image_type(url: str) -> None:
    """The content type of a file server may be generic or wrong."""
    assert await ImageCache(LOOPBACK).resolve(f"{url}/blue") == data_url(png(BLUE))
    assert "not a PNG" in await refusal(f"{url}/page")


async def test_image_is_fetched_once_for_many_turns(url: str, gallery: Gallery) -> None:
    now = 0.0
    images = ImageCache(LOOPBACK, clock=lambda: now)
    for _ in range(3):
        assert await images.resolve_all([f"{url}/a", PICTURE, f"{url}/b", f"{url}/a"]) == (PICTURE,) * 4
    assert sorted(gallery.seen) == ["/a", "/b"]
    now = 86_400.0
    await images.resolve(f"{url}/a")
    assert sorted(gallery.seen) == ["/a", "/a", "/b"]


async def test_image_cache_is_bounded(url: str, gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_KEPT_CHARACTERS", 2 * len(PICTURE))
    images = ImageCache(LOOPBACK)
    for path in ("a", "b", "a", "c", "a", "b"):
        await images.resolve(f"{url}/{path}")
    assert gallery.seen == ["/a", "/b", "/c", "/b"]


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:{port}/a", "http://localhost:{port}/a", "http://[::ffff:127.0.0.1]:{port}/a", "http://0x7f.1/a"],
)
async def test_private_address_is_not_reached(target: str, url: str, gallery: Gallery) -> None:
    message = await refusal(target.format(port=url.rpartition(":")[2]), NOTHING_ALLOWED)
    assert "could not be fetched" in message
    assert gallery.seen == []


@pytest.mark.parametrize("target", ["http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[::1]/"])
async def test_redirect_to_a_private_address_is_refused(target: str, url: str) -> None:
    assert "address is not allowed" in await refusal(target)
    assert "address is not allowed" in await refusal(f"{url}/to?url={target}", AllowedNetworks.parse(["127.0.0.1"]))
    assert "Only http" in await refusal(f"{url}/to?url=file:///etc/passwd")


async def test_failure_shows_url_and_reason_only(url: str) -> None:
    reason = "could not be fetched. Its server answered with status 404."
    assert await refusal(f"{url}/gone?key=secret") == f"The image at {url}/gone {reason}"
    message = await refusal(f"{url}/gone/{'x' * 500}")
    assert message.startswith(f"The image at {url}/gone/xxx")
    assert message.endswith(f"... {reason}")
    assert "10.0.0.1" not in (await refusal("http://inside.invalid/"))


async def test_fetched_image_size_is_limited(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetching, limits):
        monkeypatch.setattr(module, "MOST_IMAGE_BYTES", len(png()))
    assert await ImageCache(LOOPBACK).resolve(f"{url}/a") == PICTURE
    monkeypatch.setattr(fetching, "MOST_IMAGE_BYTES", len(png()) - 1)
    assert "larger" in await refusal(f"{url}/a")


async def test_total_image_size_is_limited(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image may be small enough by itself."""
    monkeypatch.setattr(fetching, "LARGEST_SUM", 3 * len(PICTURE))
    await ImageCache(LOOPBACK).resolve_all([f"{url}/a", PICTURE, f"{url}/b"])
    with pytest.raises(InvalidRequest, match="too large together"):
        await ImageCache(LOOPBACK).resolve_all([f"{url}/a", PICTURE, f"{url}/b", PICTURE])
    *shown, last = await ImageCache(LOOPBACK).resolve_all(
        [f"{url}/{at}" for at in "abcd"], {f"{url}/{at}" for at in "abcd"}
    )
    assert (shown, isinstance(last, NoImage)) == ([PICTURE] * 3, True)


async def test_failing_image_cancels_the_others(url: str) -> None:
    with pytest.raises(InvalidRequest, match="status 404"):
        await ImageCache(LOOPBACK).resolve_all([f"{url}/a", f"{url}/gone", f"{url}/b"])


async def test_fetching_stops_at_the_total_limit(url: str, gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "LARGEST_SUM", 3 * len(PICTURE))
    monkeypatch.setattr(fetching, "_AT_ONCE", 1)
    with pytest.raises(InvalidRequest, match="too large together"):
        await ImageCache(LOOPBACK).resolve_all([f"{url}/{number}" for number in range(50)])
    assert len(gallery.seen) < 10


async def test_conversations_do_not_wait_for_each_others_images(url: str, gallery: Gallery) -> None:
    """The servers of one may be slow."""
    images = ImageCache(LOOPBACK)
    slow = asyncio.create_task(images.resolve_all([f"{url}/slow?{number}" for number in range(20)]))
    await gallery.waiting.wait()
    assert await images.resolve_all([f"{url}/a"]) == (PICTURE,)
    slow.cancel()
    await asyncio.wait([slow])
