"""The files of rollouts: whole or not there, private, and in Parquet the same as in JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from penstock.extensions.rollouts import parquet, writing
from penstock.extensions.rollouts.forms import FORMS, rows
from penstock.extensions.rollouts.paths import Branch, Cut, Reward, TokenPath, ToolResult
from penstock.extensions.rollouts.writing import check_out, written
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.protocol.generations import WeightSpan
from tests.support.token_paths import token_path


def several() -> list[TokenPath]:
    """Paths with and without all that is optional."""
    plain = token_path(([1, 2], {3: -0.5, 4: -1.5}), ([5], {6: -0.25}))
    unknown = token_path(([1], [2]), number=1, cut=Cut("resp_1", 1, "edit", 3), branch=Branch(0, 1))
    (turn,) = unknown.turns
    results, sampling = (ToolResult("call_1", "18 °C"),), {"temperature": 0.5, "stop": ["x"]}
    known = {"weights": (WeightSpan("v1", 0, 1),), "results": results, "sampling": sampling, "left_out": 1}
    full = msgspec.structs.replace(unknown, turns=(msgspec.structs.replace(turn, **known),), rewards=[Reward(0.5)])
    return [plain, unknown, full]


def write(out: Path, form: str, paths: list[TokenPath]) -> None:
    with written(str(out), form) as add:
        for row in rows(form, paths):
            add(row)


def without_defaults(value: Any) -> Any:
    """A value without what is not there, as JSON leaves it out."""
    if isinstance(value, dict):
        return {name: kept for name, each in value.items() if (kept := without_defaults(each)) not in (None, "", 0, [])}
    return [without_defaults(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", FORMS)
def test_parquet_has_the_rows_of_json(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of rows has the columns of all."""
    monkeypatch.setattr(parquet, "GROUP", 12)
    for name in ("out.jsonl", "out.parquet"):
        write(tmp_path / name, form, several() * 4)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert file.num_row_groups > 1
    found = file.read().to_pylist()
    assert [[*row] for row in found] == [[*FORMS[form].row.__struct_fields__]] * 12
    for row in found:
        for name, value in row.items():
            if isinstance(value, list):
                row[name] = [None if each != each else each for each in value]  # noqa: PLR0124 - it finds NaN
        for turn in row.get("turns", ()):
            turn["sampling"] = json.loads(turn["sampling"]) or None
    assert [without_defaults(row) for row in found] == [without_defaults(line) for line in lines]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_file_is_private_and_replaces_another_one_only_when_it_is_whole(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    out.write_text("before")

    def fail() -> None:
        with written(str(out), "trl") as add:
            add(next(rows("trl", several())))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert (out.read_text(), [*tmp_path.iterdir()]) == ("before", [out])
    write(out, "trl", several())
    assert (stat.S_IMODE(out.stat().st_mode), [*tmp_path.iterdir()]) == (0o600, [out])
    assert b"before" not in out.read_bytes()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.json", "-o out.json: its end says what is written: name a file .jsonl or .parquet, or - for stdout"),
        ("nowhere/out.jsonl", "-o nowhere/out.jsonl: there is no such folder"),
    ],
)
def test_file_that_cannot_be_written_is_named(out: str, message: str) -> None:
    with pytest.raises(CannotRun) as caught:
        check_out(out)
    assert str(caught.value) == message


def test_parquet_without_pyarrow_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "find_spec", lambda _: None)
    check_out("out.jsonl")
    with pytest.raises(CannotRun, match=r"pip install 'penstock-llm\[rollouts\]'"):
        check_out("out.parquet")
