from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.pipeline.errors import InvalidPrompt
from penstock.stages.services.engines import image_decoding
from tests.support.tool_servers import BLUE, IMAGES, RED, data_url, png


def test_images_keep_their_order_and_bytes() -> None:
    shown = (png(RED), png(BLUE), png(RED))
    assert tuple(image_decoding.decoded([data_url(image) for image in shown], bytes)) == shown


@pytest.mark.parametrize(
    "broken",
    [
        png()[:20],
        png()[:24],
        png().replace(b"IHDR", b"IHDX"),
        *(IMAGES[kind] for kind in IMAGES if kind != "image/png"),
    ],
)
def test_broken_image_is_refused_by_number(broken: bytes) -> None:
    with pytest.raises(InvalidPrompt, match="Image 2 cannot be read") as refused:
        image_decoding.decoded([data_url(png()), data_url(broken)], bytes)
    assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize("error", [OSError, ValueError, SyntaxError, EOFError, ZeroDivisionError])
def test_any_decoding_error_refuses_the_image(error: type[Exception]) -> None:

    def fail(image: bytes) -> None:
        raise error("broken")

    with pytest.raises(InvalidPrompt, match="Image 1 cannot be read: broken"):
        image_decoding.decoded([data_url(png())], fail)


@pytest.mark.parametrize(
    ("sizes", "fits"), [([(100, 100)], True), ([(100, 101)], False), ([(50, 100)] * 2, True), ([(50, 100)] * 3, False)]
)
def test_pixels_of_a_prompt_are_bounded(
    sizes: list[tuple[int, int]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted before decoding, since a small file may hold very many."""
    monkeypatch.setattr(image_decoding, "MOST_PIXELS", 10_000)
    read: list[bytes] = []
    decode: Callable[[bytes], None] = read.append
    shown = [png(RED, *size) for size in sizes]
    if fits:
        image_decoding.decoded(list(map(data_url, shown)), decode)
        assert read == shown
    else:
        with pytest.raises(InvalidPrompt, match=rf"10,000 pixels in the images up to number {len(sizes)}"):
            image_decoding.decoded(list(map(data_url, shown)), decode)
        assert read == shown[:-1]


def test_decompression_bomb_is_refused_by_its_header() -> None:
    enormous = png(width=1, height=1).replace((1).to_bytes(4) * 2, (60_000).to_bytes(4) * 2)
    with pytest.raises(InvalidPrompt):
        image_decoding.decoded([data_url(enormous)], bytes)
