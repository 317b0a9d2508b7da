"""The parts of which `make site` makes the site; `tests/live/page/test_site.py` has the site itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.site.__main__ import configured, release
from docs.site.errors import OPERATORS, cause_and_cure, errors_page, kinds, texts
from docs.site.gather import ROOT, Gathered
from docs.site.http_api import objects_page
from docs.site.links import mistakes
from docs.site.llms import named_pages, write_llms
from docs.site.python_api import documented, python_page
from penstock.pipeline.distribution import own_version

GOOD = "<html><body><h1 id='top'>x</h1><a href='#top'>x</a><a href='other.html#there'>y</a></body></html>"


@pytest.mark.parametrize("kind", [*kinds(), *OPERATORS], ids=lambda kind: kind.__name__)
def test_each_error_has_a_cause_and_a_cure(kind: type[Exception]) -> None:
    cause, cure = cause_and_cure(kind)
    assert cause.endswith(".")
    assert cure.endswith(".")


def test_page_of_errors_has_each_error_and_its_texts() -> None:
    page = errors_page()
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")] == [
        kind.__name__ for kind in (*kinds(), *OPERATORS)
    ]
    found = {text.message: text for text in texts()}
    too_long = "The prompt is too long: this model's maximum context length is … tokens, the answer included, "
    assert found[f"{too_long}and the input has …."].error == "ContextTooLong"
    assert found["Only the server may set these template variables: …."].param == "chat_template_kwargs"
    assert "| text |\n|---|\n" not in page.split("### ContextTooLong")[1].split("###")[0]
    assert "| text |\n| --- |\n| The engine has died. |" in page.replace("| No engine can be reached. |\n", "")
    assert "| Only the server may set these template variables: …. | `chat_template_kwargs` |  |" in page


def test_python_api_has_what_the_pages_import() -> None:
    page = python_page()
    names = documented()
    assert {"Pipeline", "source_of"} <= names["penstock.pipeline.core"]
    assert {"Dialect", "Edge"} <= names["penstock.api.dialect"]  # of a file that a page links
    assert {f"## {module}" for module in names} <= set(page.splitlines())
    assert "### source_of" in page


def test_page_of_objects_has_fields_and_types() -> None:
    message = {"$ref": "#/components/schemas/Message"}
    fields = {
        "role": {"const": "user"},
        "parts": {"type": "array", "items": {"anyOf": [message, {"type": "null"}]}},
    }
    schema = {"description": "Words.", "required": ["role"], "properties": fields}
    objects = objects_page({"components": {"schemas": {"Message": schema}}})
    assert '| `role` | `"user"` |  |' in objects
    assert "| `parts` ? | list of [Message](OBJECTS.md#message) or null |  |" in objects


@pytest.mark.io
def test_pages_carry_the_release_and_its_commit() -> None:
    assert re.fullmatch(rf"penstock {re.escape(own_version())}(, \d{{4}}-\d\d-\d\d, commit [0-9a-f]+)?", release())


def test_links_to_files_lead_to_pages_that_show_them(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path)
    gathered.gather([ROOT / "deploy" / "README.md"])
    page = (tmp_path / "deploy/README.md").read_text()
    assert gathered.pages == ["deploy/README.md"]
    assert "](penstock.service.md)" in page
    assert "](kubernetes/README.md)" in page
    assert "](grafana/README.md)" in page
    assert "](../docs/MANY_GPUS.md)" in page
    assert (ROOT / "deploy/penstock.service").read_text() in (tmp_path / "deploy/penstock.service.md").read_text()
    chart = (tmp_path / "deploy/helm/penstock-llm/README.md").read_text()
    assert "](templates/tests/ready.yaml.md)" in chart
    assert "helmignore" not in chart
    assert "](penstock.yaml.md)" in (tmp_path / "deploy/kubernetes/README.md").read_text()


def test_pictures_are_copied(tmp_path: Path) -> None:
    Gathered(tmp_path).gather([ROOT / "docs/RECORDINGS.md"])
    picture = "tests/live/page/inspect.png"
    assert (tmp_path / picture).read_bytes() == (ROOT / picture).read_bytes()


def test_navigation_names_pages_once() -> None:
    config = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())
    pages = [page for section in config["nav"] for entries in section.values() for _, page in named_pages(entries)]
    assert len(set(pages)) == len(pages)


def test_pages_that_the_navigation_does_not_name_end_the_section_of_their_folder(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())
    named = [page for section in config["nav"] for entries in section.values() for _, page in named_pages(entries)]
    gathered = Gathered(tmp_path, list(named))
    gathered.add("deploy/MOON.md", "# On the `Moon`\n")
    sections = {name: entries for section in configured(gathered)["nav"] for name, entries in section.items()}
    assert sections["Operate"][-1] == {"On the Moon": "deploy/MOON.md"}
    gathered.pages.remove("docs/SETTINGS.md")
    with pytest.raises(FileNotFoundError, match=r"docs/SETTINGS\.md"):
        configured(gathered)


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        (GOOD, []),
        (GOOD.replace("#there", "#nowhere"), ["page.html: other.html#nowhere leads to no heading"]),
        (GOOD.replace("#top", "#bottom"), ["page.html: #bottom leads to no heading"]),
        (GOOD.replace("other.html", "none.html"), ["page.html: none.html#there leads nowhere"]),
        (GOOD.replace("other.html", "../other.html"), ["page.html: ../other.html#there leads nowhere"]),
        (GOOD.replace("other.html", "https://example.com/other.html"), []),
        (GOOD + "<img src='https://example.com/x.png'>", ["page.html: <img> requests https://example.com/x.png"]),
        (GOOD + "<script src='//example.com/x.js'>", ["page.html: <script> requests //example.com/x.js"]),
    ],
)
def test_wrong_links_are_named(page: str, wrong: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "other.html").write_text("<p id='there'>z</p>")
    assert mistakes(tmp_path) == wrong


def test_lists_for_language_models_have_the_pages_of_the_navigation(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    pages.mkdir()
    site.mkdir()
    (pages / "A.md").write_text("# A\n\n```sh\nrun\n```\n\nIt [runs](B.md). Then it ends.\n")
    config = {"site_description": "A program", "nav": [{"Start": [{"First": [{"Begin": "A.md"}]}]}]}
    write_llms(config, pages, site)
    assert (site / "llms.txt").read_text().endswith("## Start\n\n- [Begin](A.md): It runs.\n")
    assert (pages / "A.md").read_text() in (site / "llms-full.txt").read_text()
    assert (site / "A.md").read_text() == (pages / "A.md").read_text()
