"""The site for language models: each page as Markdown, ``llms.txt`` that lists them, and ``llms-full.txt`` with all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = "# penstock\n\n> {description}\n\nEach page is Markdown. llms-full.txt has all of them.\n"


def write_llms(config: dict[str, Any], pages: Path, site: Path) -> None:
    """Write the pages in the navigation, and both lists, beside the pages for people."""
    listed, full = [HEAD.format(description=config["site_description"])], list[str]()
    for section in config["nav"]:
        for name, entries in section.items():
            listed.append(f"\n## {name}\n\n")
            for title, page in named_pages(entries):
                text = (pages / page).read_text().replace("<wbr>", "")
                listed.append(f"- [{title}]({page}){_summary(text)}\n")
                full.append(f"<!-- {page} -->\n\n{text}\n")
                (site / page).parent.mkdir(parents=True, exist_ok=True)
                (site / page).write_text(text)
    (site / "llms.txt").write_text("".join(listed))
    (site / "llms-full.txt").write_text("".join(full))


def named_pages(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the pages of a section of the navigation, with their titles."""
    for entry in entries:
        for title, below in entry.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from named_pages(below)


def _summary(text: str) -> str:
    """Return the first sentence of a page, as it follows its link."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        if paragraph.strip() and paragraph.strip()[0] not in "#|*!>-<":
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return ": " + re.split(r"(?<=[.!?]) ", plain)[0].rstrip(":")
    return ""
