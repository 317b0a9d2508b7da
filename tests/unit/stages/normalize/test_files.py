"""Files in messages and in outputs: the items keep them, and the model reads their text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.superseded import KEPT_CHARACTERS
from penstock.services.store.store import Store
from penstock.stages.normalize import input_items
from tests.support.documents import as_base64
from tests.support.requests import normalize, store_answer
from tests.support.stored_responses import facts

pytestmark = pytest.mark.io

Json = dict[str, Any]

FILE = {"type": "input_file", "filename": "a.txt", "file_data": as_base64(b"Sun.")}
READ = '<file name="a.txt">\nSun.\n</file>\n'
TEXT = {"type": "input_text", "text": "What is this?"}
CALL = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "read", "input": "a.txt"}
BROKEN = FILE | {"file_data": as_base64(b"\0")}


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("role", ["user", "system", "developer"])
async def test_the_model_reads_a_text_and_the_item_keeps_the_file(store: Store, role: str) -> None:
    sent = FILE | {"detail": "low"}
    resolved = await normalize(store, input=[{"role": role, "content": [TEXT, sent, FILE, TEXT]}])
    (kept,), (read,) = resolved.facts.input, resolved.items
    assert list(msgspec.to_builtins(kept)["content"]) == [TEXT, sent, FILE, TEXT]
    assert isinstance(read, wire.Message)
    assert read.text == f"What is this?\n{READ}{READ}What is this?"


@pytest.mark.parametrize("call", [CALL, CUSTOM_CALL])
async def test_outputs_may_have_files(store: Store, call: Json) -> None:
    output = {"type": f"{call['type']}_output", "call_id": "c", "output": [FILE, TEXT]}
    _, read = (await normalize(store, input=[call, output])).items
    assert isinstance(read, wire.FunctionCallOutput | wire.CustomToolCallOutput)
    assert read.output == (wire.InputText(READ), wire.InputText("What is this?"))


async def test_a_history_is_read_again(store: Store) -> None:
    await store_answer(store, "1", input=[user(TEXT, FILE)])
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="And now?")
    (read, *_), (kept, *_) = resolved.items, resolved.history
    assert isinstance(read, wire.Message)
    assert isinstance(kept, wire.Message)
    assert (READ in read.text, READ in kept.text) == (True, False)


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (FILE | {"file_id": "file_1"}, ".file_id", "one of file_data, file_url and file_id"),
        ({"type": "input_file"}, "", "one of file_data, file_url and file_id"),
        ({"type": "input_file", "filename": "a.txt"}, "", "one of file_data, file_url and file_id"),
        (FILE | {"file_url": "https://example.com"}, "", "one of file_data, file_url and file_id"),
        ({"type": "input_file", "file_url": "file:///etc/passwd"}, ".file_url", "begins with"),
        ({"type": "input_file", "file_url": ""}, ".file_url", "begins with"),
        (FILE | {"file_data": 5}, ".file_data", "string"),
        (FILE | {"detail": "original"}, ".detail", "Input should be"),
        (BROKEN, "", r"The file 'a\.txt' cannot be read\. It is neither text"),
    ],
)
async def test_a_wrong_file_is_refused_with_its_place(store: Store, part: Json, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        await normalize(store, input=[user(TEXT, part)])
    assert refused.value.param == f"input[0].content[1]{param}"


async def test_the_assistant_has_no_files(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="assistant cannot have files") as refused:
        await normalize(store, input=[{"role": "assistant", "content": [FILE]}])
    assert refused.value.param == "input[0].content[0]"


async def test_the_number_of_files_is_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_items, "MOST_FILES", 2)
    await normalize(store, input=[user(FILE, FILE)])
    with pytest.raises(InvalidRequest, match="may have 2 files, and this one has 3"):
        await normalize(store, input=[user(FILE, FILE), user(FILE)])
    output = {"type": "function_call_output", "call_id": "c", "output": [FILE]}
    *_, read = (await normalize(store, input=[user(FILE, FILE), CALL, output])).items
    assert isinstance(read, wire.FunctionCallOutput)
    assert read.text == input_items.SURPLUS


def test_the_text_of_a_file_counts_among_what_a_compaction_leaves() -> None:
    def message(name: str) -> wire.Message:
        return wire.Message(name, "completed", "user", (wire.InputFile(file_data="YQ=="),))

    history = (message("msg_1"), message("msg_2"), wire.Compaction("cmp_1", "sealed"))
    long = "a" * KEPT_CHARACTERS
    for texts, left in (({"msg_1": ("a",), "msg_2": (long[1:],)}, 3), ({"msg_1": ("a",), "msg_2": (long,)}, 2)):
        assert len(ResolvedRequest(facts(input=()), history, files=texts).items) == left
