from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from threading import Event, Semaphore

import pytest
from PIL import Image

from penstock.pipeline.errors import InvalidPrompt
from penstock.stages.services.engines import image_decoding
from tests.support.tool_servers import BLUE, IMAGES, RED, data_url, png


def never(image: bytes) -> None:
    pytest.fail("The image was decoded.")


async def test_images_keep_their_order_and_bytes() -> None:
    shown = (png(RED), png(BLUE), png(RED))
    assert tuple(await image_decoding.decoded([data_url(image) for image in shown], bytes)) == shown


@pytest.mark.parametrize(
    "broken",
    [
        png()[:20],
        png()[:24],
        png().replace(b"IHDR", b"IHDX"),
        *(IMAGES[kind] for kind in IMAGES if kind != "image/png"),
    ],
)
async def test_broken_image_is_refused_by_number(broken: bytes) -> None:
    with pytest.raises(InvalidPrompt, match="Image 2 cannot be read") as refused:
        await image_decoding.decoded([data_url(png()), data_url(broken)], bytes)
    assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize("error", [OSError, ValueError, SyntaxError, EOFError, ZeroDivisionError])
async def test_any_decoding_error_refuses_the_image(error: type[Exception]) -> None:

    def fail(image: bytes) -> None:
        raise error("broken")

    with pytest.raises(InvalidPrompt, match="Image 1 cannot be read: broken"):
        await image_decoding.decoded([data_url(png())], fail)


@pytest.mark.parametrize(
    ("sizes", "fits"), [([(100, 100)], True), ([(100, 101)], False), ([(50, 100)] * 2, True), ([(50, 100)] * 3, False)]
)
async def test_pixels_of_a_prompt_are_bounded(
    sizes: list[tuple[int, int]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted before decoding, since a small file may hold very many."""
    monkeypatch.setattr(image_decoding, "MOST_PIXELS", 10_000)
    read: list[bytes] = []
    decode: Callable[[bytes], None] = read.append
    shown = [png(RED, *size) for size in sizes]
    if fits:
        await image_decoding.decoded(list(map(data_url, shown)), decode)
        assert read == shown
    else:
        with pytest.raises(InvalidPrompt, match=rf"Image {len(sizes)} is too large: all .* 10,000 pixels"):
            await image_decoding.decoded(list(map(data_url, shown)), decode)
        assert read == shown[:-1]


async def test_decompression_bomb_is_refused_by_its_header() -> None:
    enormous = png(width=1, height=1).replace((1).to_bytes(4) * 2, (60_000).to_bytes(4) * 2)
    with pytest.raises(InvalidPrompt):
        await image_decoding.decoded([data_url(enormous)], bytes)


async def test_large_image_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 22 kB may take a gigabyte."""
    monkeypatch.setattr(image_decoding, "LARGEST", 99)
    with pytest.raises(InvalidPrompt, match="may have 99 pixels, and this one has 100"):
        await image_decoding.decoded([data_url(png(RED, 10, 10))], never)


def jpeg(scans: int) -> bytes:
    """A progressive JPEG of 100 pixels with some more scans, as any program may append them."""
    file = BytesIO()
    Image.new("RGB", (10, 10)).save(file, "JPEG", progressive=True)
    image = file.getvalue()
    last = image[image.rindex(b"\xff\xda") : -2]
    return image[:-2] + last * (scans - image.count(b"\xff\xda")) + image[-2:]


async def test_jpeg_with_many_scans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a megabyte could keep a thread busy for an hour."""
    monkeypatch.setattr(image_decoding, "MOST_PIXELS", 200)
    assert await image_decoding.decoded([data_url(jpeg(40))], len) == [len(jpeg(40))]
    with pytest.raises(InvalidPrompt, match="Image 2 is too large: its 21 scans take too long"):
        await image_decoding.decoded([data_url(jpeg(20)), data_url(jpeg(21))], len)


@pytest.mark.parametrize("start", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF0000WEBP"])
async def test_image_of_another_format_behind_a_known_signature_is_refused(start: bytes) -> None:
    file = BytesIO()
    Image.new("RGB", (10, 10)).save(file, "TIFF")
    for content in (file.getvalue(), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        with pytest.raises(InvalidPrompt, match=r"Image 1 cannot be read: [^<]*$"):
            await image_decoding.decoded([data_url(start + content)], never)


async def test_hostile_images_leave_threads_to_other_requests() -> None:
    """However many prompts are being decoded, a thread of the loop is free."""
    held, entered = Event(), Semaphore(0)

    def decode(image: bytes) -> None:
        entered.release()
        held.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(image_decoding.decoded([data_url(png())], decode))
        try:
            async with asyncio.timeout(120):
                await asyncio.to_thread(entered.acquire)
                assert await asyncio.to_thread(lambda: "free") == "free"
        finally:
            held.set()
