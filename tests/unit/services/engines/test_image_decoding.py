from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from threading import Event, Semaphore
from typing import Any
from zlib import compress, crc32

import pytest
from PIL import Image, ImageChops

from penstock.pipeline.errors import InvalidPrompt
from penstock.services.engines import image_decoding
from tests.support.tool_servers import BLUE, IMAGES, RED, data_url, png

SIDE = 3_000
"""The width and height of an image that is measured."""

BESIDES = 8 << 20
"""Bytes that decoding takes besides, however small an image is."""


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

    with pytest.raises(InvalidPrompt, match="Image 1 cannot be read: its content is malformed"):
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
    monkeypatch.setattr(image_decoding, "LARGEST_BYTES", 799)
    with pytest.raises(InvalidPrompt, match="may take 799 bytes, and this one of 100 pixels takes 800"):
        await image_decoding.decoded([data_url(png(RED, 10, 10))], never)


async def test_large_animation_is_refused_before_pillow_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening an animated WebP decodes its first frame: two gigabytes for the largest."""
    monkeypatch.setattr(image_decoding, "LARGEST_BYTES", 1_599)
    monkeypatch.setattr(Image, "open", never)
    for color in (RED, BLUE):
        with pytest.raises(InvalidPrompt, match="takes 1,600"):
            await image_decoding.decoded([data_url(saved("WEBP", "RGB", animated=True, color=color, side=10))], never)


def saved(kind: str, mode: str, *, animated: bool = False, color: Any = 0, side: int = SIDE, **options: Any) -> bytes:
    """An image of one color in a file; a color that is transparent makes ``transparency`` of the ``options``."""
    file = BytesIO()
    image = Image.new(mode, (side, side), color)
    if animated:
        other = ImageChops.invert(image.convert("L")).convert(mode)
        options |= {"save_all": True, "append_images": [other]}
    image.save(file, kind, **options)
    return file.getvalue()


def deep_png(kind: int, channels: int, transparent: bytes = b"") -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write; ``kind`` is its color type."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    rows = compress(bytes(SIDE * (1 + SIDE * 2 * channels)), 1)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 16, kind, 0, 0, 0))
    colors = chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + colors + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


FILES: dict[str, Callable[[], bytes]] = {
    "black and white PNG": lambda: saved("PNG", "1"),
    "gray PNG": lambda: saved("PNG", "L"),
    "gray PNG with a transparent color": lambda: saved("PNG", "L", transparency=1),
    "gray PNG with alpha": lambda: saved("PNG", "LA"),
    "PNG with a palette": lambda: saved("PNG", "P"),
    "PNG with a palette and a transparent color": lambda: saved("PNG", "P", transparency=1),
    "PNG": lambda: saved("PNG", "RGB"),
    "PNG with a transparent color": lambda: saved("PNG", "RGB", transparency=(1, 1, 1)),
    "PNG with alpha": lambda: saved("PNG", "RGBA"),
    "animated PNG with alpha": lambda: saved("PNG", "RGBA", animated=True),
    "deep gray PNG": lambda: saved("PNG", "I;16"),
    "deep gray PNG with a transparent color": lambda: deep_png(0, 1, b"\0\0"),
    "deep gray PNG with alpha": lambda: deep_png(4, 2),
    "deep PNG": lambda: deep_png(2, 3),
    "deep PNG with alpha": lambda: deep_png(6, 4),
    "gray JPEG": lambda: saved("JPEG", "L"),
    "JPEG": lambda: saved("JPEG", "RGB"),
    "progressive JPEG": lambda: saved("JPEG", "RGB", progressive=True),
    "turned JPEG": lambda: saved("JPEG", "RGB", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"),
    "CMYK JPEG": lambda: saved("JPEG", "CMYK"),
    "progressive CMYK JPEG": lambda: saved("JPEG", "CMYK", progressive=True),
    "JPEG of several pictures": lambda: saved("MPO", "RGB", animated=True),
    "GIF": lambda: saved("GIF", "P"),
    "GIF with a transparent color": lambda: saved("GIF", "P", transparency=1),
    "animated GIF": lambda: saved("GIF", "P", animated=True, disposal=2),
    "animated GIF with a transparent color": lambda: saved("GIF", "P", animated=True, transparency=1),
    "WebP": lambda: saved("WEBP", "RGB"),
    "WebP without loss": lambda: saved("WEBP", "RGB", lossless=True),
    "WebP with alpha": lambda: saved("WEBP", "RGBA", color=(1, 2, 3, 4)),
    "animated WebP": lambda: saved("WEBP", "RGB", animated=True),
}

MEASURE = """
import ctypes, gc, re, sys
from pathlib import Path
from vllm.multimodal.media.image import ImageMediaIO

def memory(name):
    return int(re.search(name + "[^0-9]+([0-9]+)", Path("/proc/self/status").read_text()).group(1)) * 1024

for file in sys.argv[1:]:
    content = Path(file).read_bytes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    ImageMediaIO().load_bytes(content)
    print(memory("VmHWM") - before)
"""
"""Prints by how many bytes the memory of a process grows at most while vLLM decodes each file."""


@pytest.mark.io
@pytest.mark.slow
@pytest.mark.vllm
def test_decoding_takes_no_more_bytes_than_are_charged(tmp_path: Path) -> None:
    charged: dict[str, int] = {}
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(image := content())
        charged[name] = image_decoding._need(image).bytes
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *(tmp_path / name for name in FILES)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    taken = dict(zip(FILES, map(int, result.stdout.splitlines()[-len(FILES) :]), strict=True))
    wrong = {name: taken[name] for name in FILES if not charged[name] / 4 < taken[name] <= charged[name] + BESIDES}
    assert wrong == {}


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


async def test_client_that_leaves_takes_no_thread_of_others() -> None:
    """Its image is decoded to the end, and counts as long."""
    held, entered = Event(), Semaphore(0)

    def decode(image: bytes) -> None:
        entered.release()
        held.wait()

    try:
        left = asyncio.create_task(image_decoding.decoded([data_url(png())], decode, "greedy"))
        await asyncio.to_thread(entered.acquire)
        left.cancel()
        await asyncio.wait([left])
        late = asyncio.create_task(image_decoding.decoded([data_url(png())], decode, "greedy"))
        await asyncio.sleep(0)
        assert await image_decoding.decoded([data_url(png())], bytes, "other") == [png()]
        assert image_decoding.places.waiting_of("greedy") == 1
    finally:
        held.set()
    await late
    assert (left.cancelled(), image_decoding.places.in_use) == (True, 0)
