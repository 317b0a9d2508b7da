from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import InvalidRequest, PromptNotFound, UnsupportedParameter
from penstock.pipeline.protocol.items import InputFile, InputImage, InputText, Message
from penstock.pipeline.protocol.params.items import message
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.prompts import OF_ONE_REQUEST, Prompts, Template, UnusablePrompts, fill

TONE = """\
+++
model = "tiny"
temperature = 0.2
input = "What is {{ topic }}?"
+++
Answer in a {{tone}} tone.

Never say {{word}}, and never {{1}} or {{}}.
"""
SEEN = """\
+++
[[input]]
role = "user"
content = "Compare {{first}} with {{second}}."
+++
Look.
"""


def written(folder: Path, **files: str) -> Prompts:
    for name, text in files.items():
        (folder / f"{name.replace('__', '@')}.md").write_text(text)
    return Prompts(folder)


def request(**body: Any) -> CreateResponse:
    return read_request(json.dumps(body).encode())


def test_template_gives_what_the_request_leaves_out(tmp_path: Path) -> None:
    prompts = written(tmp_path, tone=TONE)
    variables = {"tone": "kind", "word": {"type": "input_text", "text": "no"}, "topic": "rain"}
    prompt = {"id": "tone", "variables": variables}
    whole = fill(prompts, request(prompt=prompt, temperature=0.9, reasoning=None))
    assert whole.names == {"model", "input", "instructions"}
    assert (whole.request.model, whole.request.temperature) == ("tiny", 0.9)
    assert whole.request.instructions == "Answer in a kind tone.\n\nNever say no, and never {{1}} or {{}}."
    assert whole.request.input == [message("user", "What is rain?")]
    assert whole.echo == {"id": "tone", "version": "1", "variables": variables}
    own = fill(prompts, request(prompt=prompt, input="Hi", instructions="Be brief."))
    assert (own.request.input, own.request.instructions) == ("Hi", "Be brief.")


def test_images_and_files_divide_the_text_around_them(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": "https://a.invalid/b.png"}
    file = {"type": "input_file", "file_url": "https://a.invalid/b.pdf"}
    prompts = written(tmp_path, seen=SEEN)
    whole = fill(prompts, request(prompt={"id": "seen", "variables": {"first": image, "second": file}}))
    (item,) = whole.request.input_items
    assert isinstance(item, Message)
    assert item.content == (
        InputText("Compare "),
        InputImage("https://a.invalid/b.png"),
        InputText(" with "),
        InputFile(file_url="https://a.invalid/b.pdf"),
        InputText("."),
    )
    mixed = fill(prompts, request(prompt={"id": "seen", "variables": {"first": "a {{second}}", "second": image}}))
    (item,) = mixed.request.input_items
    assert isinstance(item, Message)
    assert item.content[0] == InputText("Compare a {{second}} with ")


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text() | st.sampled_from(["{{a}}", "{{ b }}", "{{c", "\\1"]))
)
def test_value_of_a_variable_stays_text(values: dict[str, str]) -> None:
    """What looks like a variable in a value is not filled, whatever the order of the variables."""
    text = "|".join(f"{{{{{name}}}}}" for name in values)
    given_ = CreateResponse(instructions=text, input=text or "x")
    filled = Template("t", 1, given_).filled(values)
    assert (filled.instructions or "") == "|".join(values.values())
    assert filled.input_items == [message("user", "|".join(values.values()) or ("" if text else "x"))]


@given(st.text(), st.dictionaries(st.from_regex(r"\A[a-z]{1,3}\Z"), st.text(), max_size=3))
def test_variables_are_given_exactly_or_refused(text: str, values: dict[str, str]) -> None:
    template = Template("t", 1, CreateResponse(instructions=f"{text} {{{{abc}}}}"))
    if values.keys() == template.variables:
        template.filled(values)
        return
    with pytest.raises(InvalidRequest) as caught:
        template.filled(values)
    assert re.fullmatch(r"prompt\.variables\.\w+", caught.value.param or "")
    wrong = (caught.value.param or "").removeprefix("prompt.variables.")
    assert wrong in values.keys() ^ template.variables


@pytest.mark.parametrize(
    ("variables", "param", "code"),
    [
        ({"tone": "a", "word": "b"}, "prompt.variables.topic", "missing_required_parameter"),
        (
            {"tone": "a", "word": "b", "topic": "c", "more": "d"},
            "prompt.variables.more",
            "invalid_value",
        ),
        (
            {"tone": {"type": "input_image", "image_url": "https://a.invalid"}, "word": "b", "topic": "c"},
            "prompt.variables.tone",
            "invalid_value",
        ),
    ],
)
def test_wrong_variables_are_refused(tmp_path: Path, variables: Any, param: str, code: str) -> None:
    prompts = written(tmp_path, tone=TONE)
    with pytest.raises(InvalidRequest) as caught:
        fill(prompts, request(prompt={"id": "tone", "variables": variables}))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("x", "prompt"),
        ({}, "prompt.id"),
        ({"id": 5}, "prompt.id"),
        ({"id": "x", "version": 2}, "prompt.version"),
        ({"id": "x", "variables": ["a"]}, "prompt.variables"),
        ({"id": "x", "variables": {"a": 5}}, "prompt.variables.a"),
        ({"id": "x", "variables": {"a": {}}}, "prompt.variables.a.type"),
        ({"id": "x", "variables": {"a": {"type": "input_audio"}}}, "prompt.variables.a.type"),
        ({"id": "x", "variables": {"a": {"type": "input_text"}}}, "prompt.variables.a.text"),
        ({"id": "x", "variables": {"a": {"type": "input_text", "text": 5}}}, "prompt.variables.a.text"),
        ({"id": "x", "variables": {str(n): "" for n in range(101)}}, "prompt.variables"),
    ],
)
def test_malformed_prompt_is_refused_by_its_path(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(prompt=prompt)
    assert caught.value.param == param


def test_latest_version_is_used_unless_one_is_named(tmp_path: Path) -> None:
    prompts = written(tmp_path, a="one", a__2="two", a__10="ten")
    used = [fill(prompts, request(prompt={"id": "a", "version": version})) for version in (None, "1", "2", "10")]
    assert [each.request.instructions for each in used] == ["ten", "one", "two", "ten"]
    assert [each.echo and each.echo["version"] for each in used] == ["10", "1", "2", "10"]


def test_unknown_prompt_or_version_is_not_found(tmp_path: Path) -> None:
    prompts = written(tmp_path, a="one")
    for prompt, param in (({"id": "b"}, "prompt.id"), ({"id": "a", "version": "01"}, "prompt.version")):
        with pytest.raises(PromptNotFound) as caught:
            fill(prompts, request(prompt=prompt))
        assert (caught.value.status, caught.value.param) == (404, param)
    with pytest.raises(UnsupportedParameter) as refused:
        fill(Prompts(), request(prompt={"id": "a"}))
    assert "--prompts" in refused.value.message


@pytest.mark.parametrize(
    ("name", "text", "mistake"),
    [
        ("a b", "x", "NAME.md or NAME@VERSION.md"),
        ("a@0", "x", "NAME.md or NAME@VERSION.md"),
        ("a@1", "x", "is version 1, too"),
        ("b", "+++\nseed = 1\nmodel = =\n+++\nx", "line 3"),
        ("b", "+++\nmodel = 'm'\nx", "a second line with +++ is missing"),
        ("b", "+++\ntemperature = 3\n+++\nx", "temperature"),
        ("b", "+++\nwarmth = 1\n+++\nx", "warmth is no parameter"),
        ("b", "+++\nstream = true\n+++\nx", "stream is no parameter"),
        ("b", "+++\nmoderation = {model = 'm'}\n+++\nx", "moderation"),
        ("b", "+++\nuntil = 2026-01-01\n+++\nx", "until is no parameter"),
        ("b", "+++\nmodel = 2026-01-01\n+++\nx", "date"),
        ("b", "+++\ntemperature = nan\n+++\nx", "JSON"),
        ("b", "+++\n[[input]]\ntype = 'item_reference'\nid = 'x'\n+++\n", "input[0] is no message"),
        ("b", "\ud800", "utf-8"),
    ],
)
def test_wrong_file_is_refused_by_its_name(tmp_path: Path, name: str, text: str, mistake: str) -> None:
    (tmp_path / "a.md").write_text("x")
    (file := tmp_path / f"{name}.md").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UnusablePrompts) as caught:
        Prompts(tmp_path)
    assert str(caught.value).startswith("--prompts")
    assert file.name in str(caught.value)
    assert mistake in str(caught.value)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusablePrompts, match="No such file"):
        Prompts(tmp_path / "none")


def test_templates_stay_if_the_folder_turns_wrong(tmp_path: Path) -> None:
    prompts = written(tmp_path, a="one")
    (tmp_path / "a@2.md").write_text("two")
    prompts.templates = prompts.read()
    assert prompts.find("a").version == 2
    (tmp_path / "b.md").write_text("+++\n")
    with pytest.raises(UnusablePrompts):
        prompts.read()
    assert prompts.find("a").version == 2


def test_parameters_of_one_request_are_parameters() -> None:
    assert CreateResponse.model_fields.keys() > OF_ONE_REQUEST
