"""The files of `penstock batch`: each line of requests has one id, and each file of results goes on where it ended."""

from __future__ import annotations

import fcntl
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.line_files import Line, lines_of, refusal, requests_file, results_file
from penstock.pipeline.errors import CannotRun

MOST = 1000


def asked(custom_id: Any = "a", **changed: Any) -> bytes:
    given = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {"n": 1}} | changed
    return json.dumps({name: value for name, value in given.items() if value is not ...}).encode()


def read(*texts: bytes, most: int = MOST) -> list[Line]:
    return list(lines_of(BytesIO(b"\n".join(texts)), most))


def answer(status: int = 200, body: bytes = b"{}") -> LineAnswer:
    return LineAnswer(status, body=body, request_id="req_1")


def test_line_has_the_request() -> None:
    (line,) = read(asked())
    assert (line.custom_id, line.path, line.body, line.problem) == ("a", "/v1/chat/completions", b'{"n": 1}', "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "Line 2: Input data was truncated."),
        (b"\xff", "Line 2: JSON is malformed: invalid character (byte 0)."),
        (b"[]", "Line 2: Expected `object`, got `array`."),
        (asked(...), "Line 2: Object missing required field `custom_id`."),
        (asked(7), "Line 2: Expected `str`, got `int` - at `$.custom_id`."),
        (asked("b", method="GET"), "Line 2: Invalid enum value 'GET' - at `$.method`."),
        (asked("b", url=...), "Line 2: Object missing required field `url`."),
        (asked("b", body=...), "Line 2: Object missing required field `body`."),
        (asked("b", body=[]), "Line 2: the body is not an object."),
        (asked("a", body={"n": 2}), "Line 2: line 1 has the same custom_id."),
        (asked("b", body={"n": "x" * MOST}), f"Line 2: it has over {MOST} bytes."),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else "",
)
def test_wrong_line_says_what_is_wrong_and_leaves_the_others(text: bytes, problem: str) -> None:
    first, wrong, last = read(asked(), text, asked("c"))
    assert (first.problem, last.problem, last.custom_id) == ("", "", "c")
    assert wrong.problem.startswith(problem)


def test_deep_line_is_wrong() -> None:
    first, deep = read(asked(), b'{"body":' + b"[" * 100_000, most=10**6)
    assert (first.problem, deep.problem[:7]) == ("", "Line 2:")


def test_each_line_has_an_id_of_its_own_which_it_keeps() -> None:
    texts = [asked(), asked("b"), b"{", b"{", asked(), b"x" * MOST * 3, b"x" * MOST * 3, asked("b")]
    lines = read(*texts)
    assert [line.id for line in lines] == [line.id for line in read(*texts)]
    assert len({line.id for line in lines}) == len(texts)
    assert read(b"", b"  ", asked("c"), asked("b"))[1].id == lines[1].id


@pytest.mark.parametrize("text", [b"", b"\n", b" \n\r\n\n"])
def test_empty_file_has_no_lines(text: bytes) -> None:
    assert read(text) == []


def test_result_has_the_form_of_run_batch(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with results_file(str(out)) as results:
        results.add(Line("batch_req_1", "a"), answer(body=b'{"id": "chatcmpl-1"}'))
        results.add(Line("batch_req_2", "b"), answer(404, refusal("There is none.")))
        failed = LineAnswer(200, body=b'{"status": "failed"}', request_id="req_1", has_failed=True)
        results.add(Line("batch_req_3", "c"), failed)
        assert results.failed == 2
    good, bad, ended = map(json.loads, out.read_text().splitlines())
    assert good == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"id": "chatcmpl-1"}},
        "error": None,
    }
    assert bad["response"] == {"status_code": 404, "request_id": "req_1", "body": None}
    assert bad["error"]["error"]["message"] == "There is none."
    assert (ended["response"]["body"], ended["error"]) == (None, {"status": "failed"})


@pytest.mark.parametrize("body", [b"Bad gateway", b"<html>\nBad gateway", b'{\n"a": 1}', b""])
def test_answer_of_a_proxy_is_one_line_of_json(tmp_path: Path, body: bytes) -> None:
    (line,) = read(asked())
    for status in (200, 502):
        name = str(tmp_path / f"{status}")
        with results_file(name) as results:
            results.add(line, answer(status, body))
        with results_file(name) as results:
            assert results.done == {line.id}


def test_results_go_on_after_those_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with results_file(str(out)) as results:
        results.add(Line("1"), answer())
        results.add(Line("2"), answer(400))
    with results_file(str(out)) as results:
        assert (results.done, results.failed) == ({"1", "2"}, 1)
        results.add(Line("3"), answer())
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["1", "2", "3"]


def test_torn_last_result_is_removed_wherever_it_was_torn(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with results_file(str(out)) as results:
        results.add(Line("1", "ä"), answer())
        kept = out.read_bytes()
        results.add(Line("2", "ö"), answer(body=b'{"text": "\xc3\xa4\\n}"}'))
    whole = out.read_bytes()
    for end in range(len(kept), len(whole) + 1):
        out.write_bytes(whole[:end])
        with results_file(str(out)) as results:
            is_whole = end >= len(whole) - 1  # its newline may be missing
            assert results.done == ({"1", "2"} if is_whole else {"1"})
            results.add(Line("3"), answer())
        assert out.read_bytes().startswith(whole if is_whole else kept)
        assert [json.loads(line)["id"] for line in out.read_bytes().splitlines()][-1] == "3"


@pytest.mark.parametrize("text", [asked() + b"\n", b"notes\n", b'{"id": "1"}\n{}\n'])
def test_file_of_something_else_is_left_alone(text: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(text)
    with pytest.raises(CannotRun, match="is no result: name another file as OUT"), results_file(str(out)):
        pass
    assert out.read_bytes() == text


def test_file_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with out.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CannotRun, match="another penstock batch writes this file"), results_file(str(out)):
            pass


def test_urls_are_refused_with_the_command_to_write() -> None:
    url = "http://h/in.jsonl"
    with pytest.raises(CannotRun, match=re.escape(f"curl -sSf {url} | penstock batch -")), requests_file(url):
        pass
    with pytest.raises(CannotRun, match=re.escape(f"curl -T FILE {url}")), results_file(url):
        pass


def test_result_of_any_id_can_be_decoded(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with results_file(str(out)) as results:
        results.add(Line("1", '"\n\u2028\ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16")), answer())
    (line,) = out.read_bytes().splitlines()
    assert msgspec.json.decode(line)["custom_id"] == '"\n\u2028\U0001f600'
