from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import FormData, MultipartWriter
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.models.named_bodies import LONGEST_HEADERS, LONGEST_NAME, MOST_PARTS, read_named
from penstock.pipeline.errors import InvalidRequest
from tests.support.examples import examples

JSON = "application/json"
FORM = 'multipart/form-data; boundary="a b"'
QUICK = examples(50)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)
names = st.text(st.characters(codec="utf-8"), max_size=20)
fields = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters='"\\%;'), min_size=1)
PARTS = st.lists(st.tuples(fields.filter(lambda name: name != "model"), st.binary(max_size=200)), max_size=5)


def part(content: bytes, name: str = "model", head: bytes = b"") -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"\r\n'.encode()
    return b"--a b\r\n" + (head or disposition) + b"\r\n" + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--a b--\r\n"


@QUICK
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values), names, st.booleans())
def test_name_in_json_is_found_and_replaced_alone(body: dict[str, Any], name: str, is_ascii: bool) -> None:
    body.pop("model", None)
    for sent in (body, {"model": "a", **body}, {**body, "model": "a"}):
        read = read_named(json.dumps(sent, ensure_ascii=is_ascii).encode(errors="replace"), JSON)
        assert read.model == sent.get("model")
        assert json.loads(read.with_model(name)) == {**sent, "model": name}


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (rb'{"mod\u0065l": "a"}', "a"),
        (b'{"model": "a", "model": "b"}', "b"),
        (b' {"model": null}', None),
        (rb'{"input": "\ud800", "model": "a"}', "a"),
        (b"{}", None),
    ],
)
def test_json_is_read_as_json_parsers_do(body: bytes, model: str | None) -> None:
    read = read_named(body, JSON)
    assert (read.body, read.model) == (body, model)
    assert json.loads(read.with_model("c"))["model"] == "c"


@pytest.mark.parametrize("body", [b"", b"[]", b"a", b'{"model": 1}', b'{"model": ["a"]}', b"{", b'{"a": NaN}', b"\xff"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_named(body, JSON)


@QUICK
@given(PARTS, PARTS, names.filter(lambda name: "\r\n--a b" not in name))
def test_name_in_a_form_is_found_in_any_place_and_replaced_alone(
    before: list[tuple[str, bytes]], after: list[tuple[str, bytes]], name: str
) -> None:
    around = [part(content, field) for field, content in before], [part(content, field) for field, content in after]
    body = form(*around[0], part(b"whisper"), *around[1])
    if body.count(b"--a b") != len(before) + len(after) + 2:
        return  # a content with the boundary
    read = read_named(body, FORM)
    assert (read.body, read.model) == (body, "whisper")
    assert read.with_model(name) == form(*around[0], part(name.encode()), *around[1])
    nameless = read_named(form(*around[0], *around[1]), FORM)
    assert nameless.model is None
    assert nameless.with_model(name) == form(part(name.encode()), *around[0], *around[1])


@pytest.mark.parametrize("quotes", [True, False])
async def test_forms_of_clients_are_read(quotes: bool) -> None:
    written = FormData(quote_fields=quotes, default_to_multipart=True)
    written.add_field("file", b"\x00\r\n--\xff" * 1000, filename='ä "b".wav', content_type="audio/wav")
    written.add_field("model", "whisper")
    writer = written()
    assert isinstance(writer, MultipartWriter)
    assert read_named(await writer.as_bytes(), writer.headers["Content-Type"]).model == "whisper"


HEADER = b"Content-Disposition: form-data; "
AMBIGUOUS = {
    "twice": form(part(b"a"), part(b"b")),
    "twice, once in code": form(part(b"a"), part(b"b", head=HEADER + b"name*=utf-8''model\r\n")),
    "two names": form(part(b"a", head=HEADER + b'name="a"; name="model"\r\n')),
    "two headers": form(part(b"a", head=HEADER + b'name="a"\r\n' + HEADER + b'name="model"\r\n')),
    "escaped": form(part(b"a", head=HEADER + b'name="mo\\del"\r\n')),
    "in percents": form(part(b"a", head=HEADER + b'name="%6dodel"\r\n')),
    "no name": form(part(b"a", head=HEADER + b'filename="model"\r\n')),
    "no header": form(b"--a b\r\n\r\na\r\n"),
    "folded": form(part(b"a", head=b'Content-Disposition: form-data;\r\n name="model"\r\n')),
    "a bare line end": form(part(b"a", head=HEADER + b'name="a"\nX: y\r\n')),
    "a space before the colon": form(part(b"a", head=b'Content-Disposition : form-data; name="model"\r\n')),
    "coded": form(part(b"YQ==", head=HEADER + b'name="model"\r\nContent-Transfer-Encoding: base64\r\n')),
    "a text before": b"model\r\n" + form(part(b"a")),
    "bare line ends": form(part(b"a")).replace(b"\r\n", b"\n"),
    "no end": form(part(b"a")).removesuffix(b"--a b--\r\n"),
    "cut": form(part(b"a"))[:-6],
    "a longer boundary": form(part(b"a\r\n--a bc\r\nb")),
    "empty": b"",
    "no UTF-8": form(part(b"\xff")),
    "long": form(part(b"a" * (LONGEST_NAME + 1))),
    "long headers": form(part(b"a", head=HEADER + b'name="model"\r\nX: ' + b"y" * LONGEST_HEADERS + b"\r\n")),
    "many parts": form(part(b"a") + part(b"", "x") * MOST_PARTS),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_form_that_could_be_read_in_two_ways_is_refused(name: str) -> None:
    assert read_named(form(part(b"a")), FORM).model == "a"
    with pytest.raises(InvalidRequest):
        read_named(AMBIGUOUS[name], FORM)


@pytest.mark.parametrize(
    "parameters", ["", "; boundary=", "; boundary=a; boundary=b", f"; boundary={'a' * 71}", "; boundary=ä"]
)
def test_form_needs_one_boundary(parameters: str) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        read_named(b"--a\r\n", f"multipart/form-data{parameters}")
