from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from penstock.stages.normalize import input_items
from penstock.stages.render.blind import without_images
from tests.support.requests import normalize, store_answer
from tests.support.tool_servers import BLUE, data_url, png

PICTURE = data_url(png())
IMAGE = {"type": "input_image", "image_url": PICTURE}
TEXT = {"type": "input_text", "text": "What is this?"}
CALL = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "view_image", "input": "a.png"}

Json = dict[str, Any]


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize(("sent", "detail"), [({}, "auto"), ({"detail": None}, "auto"), ({"detail": "low"}, "low")])
async def test_images_are_parts_of_messages(store: Store, role: str, sent: Json, detail: Any) -> None:
    parts = [TEXT, IMAGE | sent, {"type": "input_image", "image_url": "https://example.com/a.png"}, TEXT]
    body = [{"role": role, "content": parts}]
    (message,) = (await normalize(store, sees=True, input=body)).facts.input
    assert isinstance(message, wire.Message)
    text = wire.InputText("What is this?")
    assert message.content == (
        text,
        wire.InputImage(PICTURE, detail),
        wire.InputImage("https://example.com/a.png"),
        text,
    )
    assert message.text == "What is this?What is this?"


@pytest.mark.parametrize(
    ("call", "kind"),
    [(CALL, wire.FunctionCallOutput), (CUSTOM_CALL, wire.CustomToolCallOutput)],
    ids=["function", "custom"],
)
@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "input_image", "image_url": PICTURE}],  # Codex's view_image
        [{"type": "input_image", "image_url": PICTURE, "detail": "high"}],
        [TEXT, {"type": "input_image", "image_url": PICTURE, "detail": None, "file_id": None}],  # the Agents SDK's
    ],
)
async def test_tool_outputs_may_have_images(store: Store, call: Json, kind: type, parts: list[Json]) -> None:
    output = {"type": f"{call['type']}_output", "call_id": "c", "output": parts}
    _, item = (await normalize(store, sees=True, input=[call, output])).facts.input
    assert isinstance(item, kind)
    (image,) = wire.images_of(item)
    assert image.image_url == PICTURE


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "input_image"}, ".image_url", "either an image_url or a file_id"),
        ({"type": "input_image", "file_id": "file_1"}, ".file_id", "No such File object: file_1"),
        ({"type": "input_image", "file_id": "file_1", "image_url": PICTURE}, ".file_id", "either an image_url"),
        ({"type": "input_image", "image_url": "data:,"}, ".image_url", "image cannot be read"),
        ({"type": "input_image", "image_url": data_url(b"<svg/>", "image/svg+xml")}, ".image_url", "Its type"),
        ({"type": "input_image", "image_url": "file:///etc/passwd"}, ".image_url", "begins with"),
        ({"type": "input_image", "image_url": "ftp://example.com/a.png"}, ".image_url", "begins with"),
        ({"type": "input_image", "image_url": "/tmp/a.png"}, ".image_url", "begins with"),
        ({"type": "input_image", "image_url": ""}, ".image_url", "begins with"),
        ({"type": "input_image", "image_url": 5}, ".image_url", "string"),
        ({"type": "input_image", "image_url": PICTURE, "detail": "tiny"}, ".detail", "Input should be"),
        ({"type": "input_file", "file_id": "file_1"}, ".file_id", "No such File object: file_1"),
    ],
)
async def test_invalid_image_is_refused_with_its_place(store: Store, part: Json, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        await normalize(store, sees=True, input=[user(TEXT, part)])
    assert refused.value.param == f"input[0].content[1]{param}"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image"},
        {"type": "input_image", "file_id": "file_1", "image_url": PICTURE},
        {"type": "input_image", "image_url": 5},
        {"type": "input_image", "image_url": PICTURE, "detail": "tiny"},
        {"type": "input_file", "filename": "a.txt"},
    ],
)
async def test_a_part_of_the_wrong_form_is_refused_in_an_output_too(store: Store, part: Json) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": [TEXT, part]}
    with pytest.raises(InvalidRequest) as refused:
        await normalize(store, sees=True, input=[CALL, output])
    assert (refused.value.param or "").startswith("input[1].output[1]")


@pytest.mark.parametrize("call", [CALL, CUSTOM_CALL])
async def test_stored_image_is_read_in_place_of_its_id(store: Store, call: Json) -> None:
    async with store.part(StoredFiles).uploading("ann") as upload:
        await upload.write(png())
        file = await upload.finish("a.png", "vision")
    sent = {"type": "input_image", "file_id": file.id, "detail": "high"}
    output = {"type": f"{call['type']}_output", "call_id": "c", "output": [sent]}
    resolved = await normalize(store, owner="ann", sees=True, input=[user(TEXT, sent), call, output])
    for item, read in zip(resolved.facts.input, resolved.items, strict=True):
        if wire.images_of(item):
            assert wire.images_of(item) == (wire.InputImage(detail="high", file_id=file.id),)
            assert wire.images_of(read) == (wire.InputImage(PICTURE, "high"),)
    with pytest.raises(InvalidRequest, match="No such File object"):
        await normalize(store, owner="bob", sees=True, input=[user(sent)])
    with pytest.raises(InvalidRequest, match="reads text only"):
        await normalize(store, owner="ann", input=[user(sent)])


async def test_stored_file_that_is_no_image_is_refused(store: Store) -> None:
    async with store.part(StoredFiles).uploading("") as upload:
        await upload.write(b"words")
        file = await upload.finish("a.png", "vision")
    with pytest.raises(InvalidRequest, match=r"'a\.png' cannot be read\. It is not a PNG") as refused:
        await normalize(store, sees=True, input=[user({"type": "input_image", "file_id": file.id})])
    assert refused.value.param == "input[0].content[0]"


async def test_assistant_messages_have_no_images(store: Store) -> None:
    """The API allows them in input only."""
    with pytest.raises(InvalidRequest, match="cannot have images") as refused:
        await normalize(store, sees=True, input=[{"role": "assistant", "content": [IMAGE]}])
    assert refused.value.param == "input[0].content[0]"


@pytest.mark.parametrize("before", [0, 2])
async def test_images_of_the_history_count_towards_the_limit(
    store: Store, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_items, "MOST_IMAGES", 3)
    earlier = await store_answer(store, "1", sees=True, input=[user(*[IMAGE] * before, TEXT)])
    continued: Json = {"previous_response_id": earlier.facts.response.id}
    await normalize(store, "2", sees=True, input=[user(*[IMAGE] * (3 - before))], **continued)
    with pytest.raises(InvalidRequest, match="may have 3 images, and this one has 4") as refused:
        await normalize(store, "3", sees=True, input=[user(*[IMAGE] * (4 - before))], **continued)
    assert refused.value.param == "input"
    other = {"type": "input_image", "image_url": data_url(png(BLUE))}
    output = {"type": "function_call_output", "call_id": "c", "output": [*[IMAGE] * (3 - before), other]}
    resolved = await normalize(store, "4", sees=True, input=[CALL, output], **continued)
    assert [image.url for item in resolved.items for image in wire.images_of(item)] == [PICTURE] * 3
    last = resolved.items[-1]
    assert isinstance(last, wire.FunctionCallOutput)
    assert last.text.endswith("a conversation may have 3 images, and this one has 4.]")


async def _previous(store: Store) -> Json:
    earlier = await store_answer(store, "1", sees=True, input=[user(TEXT, IMAGE)])
    return {"previous_response_id": earlier.facts.response.id, "input": "And now?"}


async def _reference(store: Store) -> Json:
    earlier = await store_answer(store, "1", sees=True, input=[user(TEXT, IMAGE)])
    return {"input": [{"type": "item_reference", "id": earlier.facts.input[0].id}]}


@pytest.mark.defect("V14")
@pytest.mark.parametrize("past", [_previous, _reference])
async def test_images_of_the_history_stay_for_a_model_that_sees(store: Store, past: Callable[[Store], Any]) -> None:
    body = await past(store)
    resolved = await normalize(store, "2", sees=True, **body)
    shown = [image for item in (*resolved.history, *resolved.facts.input) for image in wire.images_of(item)]
    assert [image.image_url for image in shown] == [PICTURE]
    read = without_images(await normalize(store, "3", **body)).items[0]
    assert isinstance(read, wire.Message)
    assert read.text == "What is this?\n[The image cannot be shown: this model reads text only.]"


PICTURED, OUTPUT = user(IMAGE), {"type": "function_call_output", "call_id": "c", "output": "x"}
SAID = {"role": "assistant", "content": "x"}
BEGUN = SAID | {"status": "incomplete"}


@pytest.mark.parametrize(
    ("items", "now"),
    [
        ([PICTURED], [0]),
        ([PICTURED, user(TEXT)], [0, 1]),
        ([{"role": "developer", "content": "x"}, PICTURED], [0, 1]),
        ([PICTURED, SAID, user(TEXT)], [2]),
        ([PICTURED, SAID], []),
        ([PICTURED, BEGUN], [0, 1]),
        ([CALL, OUTPUT], []),
        ([PICTURED, CALL, OUTPUT, user(TEXT)], []),
        ([CALL, OUTPUT, SAID, user(TEXT), PICTURED], [3, 4]),
        ([PICTURED, {"type": "reasoning", "summary": []}, user(TEXT)], [2]),
        ([user(TEXT), {"type": "configuration_update", "reasoning": {"effort": "low"}}, user(TEXT)], [0, 1, 2]),
    ],
)
async def test_now_is_what_follows_all_that_a_model_wrote(store: Store, items: list[Json], now: list[int]) -> None:
    resolved = await normalize(store, sees=True, input=items)
    assert [at for at, item in enumerate(resolved.facts.input) if item.id in resolved.said] == now
