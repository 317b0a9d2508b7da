"""The pages of the repository, gathered as the pages of the site: each stays where it is, so that their links hold.

A link to a file that is no page leads to a page that shows the file, and one to a folder to a list of its files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import normpath

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "deploy", "docs", "extensions", "fixtures", "pipeline", "services", "stages", "testing", "tests")
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")))
    if "node_modules" not in path.parts
)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
_PICTURE = re.compile(r'\b(src|srcset)="([^"\s]+)"')
_HIDDEN = {".", "_"}
"""Starts of the names of files and folders that are not for readers."""

_PICTURES = (".png", ".svg")
_LANGUAGES = {".yml": "yaml", ".service": "ini", "": "docker"}
"""Names by which the highlighter knows a language, where they are not the end of the file's name."""


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub writes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@dataclass
class Gathered:
    """A folder with the pages of the site, and the names of those that are in its navigation and its search."""

    folder: Path
    pages: list[str] = field(default_factory=list[str])

    def add(self, name: str, text: str) -> None:
        """Write a page."""
        self.write(name, text)
        self.pages.append(name)

    def write(self, name: str, text: str) -> None:
        """Write a file of the site."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def gather(self, paths: Sequence[Path] = PAGES) -> None:
        """Write the pages of the repository, and the files that they link to."""
        for path in paths:
            self.add(str(path.relative_to(ROOT)), self._relinked(path))

    def _relinked(self, page: Path) -> str:
        """Return the text of a page with the links of the site; blocks of code are as they were."""
        text = page.read_text()

        def parts() -> Iterator[str]:
            end = 0
            for start, after in (*(block.span() for block in FENCED.finditer(text)), (len(text), len(text))):
                linked = LINK.sub(lambda link: f"]({self._target(link[1], page)})", text[end:start])
                yield _PICTURE.sub(lambda image: f'{image[1]}="{self._target(image[2], page)}"', linked)
                yield text[start:after]
                end = after

        return "".join(parts())

    def _target(self, link: str, page: Path) -> str:
        """Return the link on a page to what the site has instead of a file or a folder."""
        place, _, _ = link.partition("#")
        if not place or "://" in place or place.endswith(".md"):
            return link
        name = normpath(page.parent.relative_to(ROOT) / place)
        path = ROOT / name
        if path.suffix in _PICTURES:
            self.folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.folder / name)
            return link
        if path.is_dir():
            return f"{place}/{self._list(path)}"
        self._show(path)
        return f"{place}.md"

    def _list(self, path: Path) -> str:
        """Write the list of a folder's files, unless it has a page; return its name."""
        if (path / "README.md").exists():
            return "README.md"
        names = {file: file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()}
        files = {file: name for file, name in names.items() if not _HIDDEN & {part[:1] for part in name.parts}}
        for file in files:
            self._show(file)
        lines = "".join(f"* [{name}]({name}.md)\n" for name in files.values())
        self.write(f"{path.relative_to(ROOT)}/README.md", f"{_UNSEARCHED}# `{path.relative_to(ROOT)}`\n\n{lines}")
        return "README.md"

    def _show(self, path: Path) -> None:
        language = _LANGUAGES.get(path.suffix, path.suffix.removeprefix("."))
        text = path.read_text()
        name = path.relative_to(ROOT)
        self.write(f"{name}.md", f"{_UNSEARCHED}# `{name}`\n\n````{language}\n{text}\n````\n")


_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def title(text: str) -> str:
    """Return the first heading of a page, without marks."""
    heading = re.search(r"^#+ (.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", heading[1]) if heading else ""
