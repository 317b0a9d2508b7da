"""Files of requests on a server that reads none: refused if the client sends them now, else replaced by a sentence."""

from __future__ import annotations

import pytest

from penstock.extensions.tools.files.file_reader import FileReader
from penstock.pipeline import plugins
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import InputFile, InputImage
from penstock.services.file_reading import Files, NoFiles, PlacedFile, open_files
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store

PATH = "input[0].content[1]"
SENT = (
    InputFile(filename='a".pdf', file_id="file-1"),
    InputImage(file_id="file-1"),
    InputFile(file_id=""),
)


@pytest.mark.parametrize("part", SENT)
async def test_an_id_is_refused_as_by_a_server_without_files(part: InputFile | InputImage) -> None:
    readers: tuple[Files, ...] = (NoFiles(), FileReader())
    refused = list[tuple[int, str, str | None]]()
    for reader in readers:
        with pytest.raises(InvalidRequest) as caught:
            await reader.read_all([PlacedFile("msg_1", part, PATH)], "", Store(NullDatabase()))
        refused.append((caught.value.status, caught.value.message, caught.value.param))
    assert refused[0] == refused[1]
    assert refused[0][2] == f"{PATH}.file_id"


@pytest.mark.parametrize("part", [InputFile("a.pdf", "JVBE"), InputFile("a.pdf", file_url="https://example.com/b.pdf")])
async def test_a_file_is_refused_with_its_place(part: InputFile) -> None:
    with pytest.raises(InvalidRequest, match=r"'a\.pdf' cannot be read\. This server reads no files") as refused:
        await NoFiles().read_all([PlacedFile("msg_1", part, PATH)], "", Store(NullDatabase()))
    assert refused.value.param == PATH


@pytest.mark.parametrize("part", [*SENT, InputFile("a.pdf", "JVBE")])
async def test_a_conversation_with_files_goes_on(part: InputFile | InputImage) -> None:
    (reading,) = await NoFiles().read_all([PlacedFile("msg_1", part)], "", Store(NullDatabase()))
    assert isinstance(reading, str)
    assert reading.endswith(": this server reads no files.]")


def test_the_reader_comes_through_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_files(), FileReader)
    monkeypatch.setattr(plugins, "installed", lambda group: {})
    assert isinstance(open_files(), NoFiles)
