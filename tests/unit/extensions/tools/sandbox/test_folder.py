"""The folder of a container, in which code may have left anything."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.tools.sandbox.disk import MOST_FILES
from penstock.extensions.tools.sandbox.folder import DEEPEST, Folder, is_name
from penstock.services.containers import NoSuchFile
from tests.support.examples import examples

pytestmark = pytest.mark.io


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder(drops_user=False)
    yield made
    asyncio.run(made.remove())


def paths(folder: Folder) -> list[str]:
    return [file.path for file in folder.files()]


def test_only_plain_files_are_listed(folder: Folder) -> None:
    (folder.path / "a").write_bytes(b"123")
    (folder.path / "d").mkdir()
    (folder.path / "d" / "b").touch()
    (folder.path / ".hidden").touch()
    (folder.path / "new\nline").touch()
    (folder.path / os.fsdecode(b"not utf-8 \xff")).touch()
    (folder.path / "link").symlink_to("/etc/passwd")
    (folder.path / "up").symlink_to("..")
    os.mkfifo(folder.path / "pipe")
    assert [(file.path, file.size) for file in folder.files()] == [("a", 3), ("d/b", 0)]


def test_listing_ends(folder: Folder) -> None:
    for number in range(MOST_FILES + 10):
        (folder.path / f"{number}").touch()
    assert len(folder.files()) <= MOST_FILES
    at = folder.path / "deep"
    for _ in range(DEEPEST + 5):
        at.mkdir()
        at = at / "d"
    assert all(path.count("/") <= DEEPEST for path in paths(folder))


def test_sparse_file_is_read_as_far_as_asked(folder: Folder) -> None:
    with (folder.path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert len(folder.read("sparse", 1000)) == 1000


@pytest.mark.parametrize("path", ["..", "../x", "d/../a", "/etc/passwd", "link", "up/x", "pipe", "d", "", ".", "d/"])
def test_path_leads_nowhere_else(folder: Folder, path: str) -> None:
    (folder.path / "a").touch()
    (folder.path / "d").mkdir()
    (folder.path / "link").symlink_to("/etc/passwd")
    (folder.path / "up").symlink_to("/etc")
    os.mkfifo(folder.path / "pipe")
    with pytest.raises(NoSuchFile):
        folder.read(path, 10)


def test_file_takes_the_place_of_a_link_and_not_of_its_target(folder: Folder, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("of the host")
    (folder.path / "a").symlink_to(target)
    file, hidden = folder.begin()
    os.write(file, b"new")
    os.close(file)
    folder.finish(hidden, "a")
    assert target.read_text() == "of the host"
    assert folder.read("a", 10) == b"new"


@given(st.text(max_size=30))
@examples(100)
def test_name_is_one_entry_of_the_folder(name: str) -> None:
    if is_name(name):
        assert PurePosixPath("/a", name).parts == ("/", "a", name)
        assert name.isprintable()
