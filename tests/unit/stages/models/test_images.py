from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.stages.models import images
from penstock.stages.models.images import NoImage, as_data_url, check_data_url, image_in, kind_of
from tests.support.tool_servers import IMAGES, data_url, png

_starts = st.sampled_from(sorted(IMAGES.values()))
_kinds = st.sampled_from([*IMAGES, "image/jpg", "IMAGE/PNG"])


@given(kind=_kinds, start=_starts, rest=st.binary(max_size=200), options=st.sampled_from(["", ";charset=utf-8"]))
def test_base64_image_is_accepted(kind: str, start: bytes, rest: bytes, options: str) -> None:
    url = f"data:{kind}{options};base64,{base64.b64encode(start + rest).decode()}"
    check_data_url(url)
    assert image_in(url) == start + rest


@given(url=st.text(max_size=60) | st.text(max_size=60).map(lambda text: f"data:image/png;base64,{text}"))
@example("data:image/png;base64,")
@example("data:image/png;base64,====")
@example("data:image/png;base64,iVBORw0KGgo=iVBORw0KGgo=")
@example("data:image/png,iVBORw0KGgo=")
@example("data:;base64,iVBORw0KGgo=")
def test_anything_else_is_refused(url: str) -> None:
    try:
        check_data_url(url)
    except NoImage:
        return
    assert kind_of(base64.b64decode(url.partition(",")[2], validate=True))


@given(at=st.integers(0, 140_000), flaw=st.sampled_from(["=", " ", "\n", "-", "é", "==="]))
def test_flaw_is_found_at_any_place(at: int, flaw: str) -> None:
    encoded = base64.b64encode(png() + bytes(100_000)).decode()
    at = min(at, len(encoded) - 4)
    with pytest.raises(NoImage):
        check_data_url(f"data:image/png;base64,{encoded[:at]}{flaw}{encoded[at + 1 :]}")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(b"<svg/>", "image/svg+xml"), "Its type is not"),
        (data_url(b"%PDF-1.7", "application/pdf"), "Its type is not"),
        (data_url(b"<html><body>Hello", "image/png"), "not a PNG"),
        ("data:image/png,plain", "begins with"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,iVBORw0KGg", "base64"),
    ],
)
def test_refusal_has_a_reason(url: str, reason: str) -> None:
    with pytest.raises(NoImage, match=reason):
        check_data_url(url)


def test_image_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_IMAGE_BYTES", 300)
    check_data_url(data_url(png().ljust(300, b"\0")))
    with pytest.raises(NoImage, match="larger"):
        check_data_url(data_url(png().ljust(303, b"\0")))


@pytest.mark.parametrize("kind", IMAGES)
def test_data_url_has_the_type_of_its_bytes(kind: str) -> None:
    assert as_data_url(IMAGES[kind]) == data_url(IMAGES[kind], kind)
