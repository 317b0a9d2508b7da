"""Build the site: ``python -m docs.site FOLDER``."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from docs.site.checks import checks_page
from docs.site.clients import clients_page
from docs.site.errors import errors_page
from docs.site.gather import Gathered, title
from docs.site.http_api import described, pages
from docs.site.links import mistakes
from docs.site.llms import named_pages, write_llms
from docs.site.python_api import python_page
from penstock.pipeline.distribution import own_version

HERE = Path(__file__).parent
ASSETS = ("icon.svg", "iframe-worker.js", "site.css")
SECTIONS = {"deploy": "Operate", "docs": "Build"}
"""The sections of pages that the navigation does not name, by their folder; those of other folders are for authors."""


def build(folder: Path) -> list[str]:
    """Build the site in the folder ``site`` of a folder; return what is wrong with its links."""
    shutil.rmtree(folder, ignore_errors=True)
    gathered = Gathered(folder / "pages")
    gathered.gather()
    for name, text in pages(asyncio.run(described(folder / "server"))):
        gathered.add(f"docs/{name}", text)
    gathered.add("docs/CHECKS.md", checks_page())
    gathered.add("docs/CLIENT_MATRIX.md", clients_page())
    gathered.add("docs/ERRORS.md", errors_page())
    gathered.add("docs/PYTHON_API.md", python_page())
    for name in ASSETS:
        gathered.write(f"docs/site/{name}", (HERE / name).read_text())
    config = configured(gathered) | {"copyright": release()}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    _run_zensical(folder)
    site = folder / "site"
    _give_worker(site)
    write_llms(config, gathered.folder, site)
    return mistakes(site)


def configured(gathered: Gathered) -> dict[str, Any]:
    """Return the configuration of the site, with all pages in its navigation."""
    config: dict[str, Any] = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    config |= {"docs_dir": "pages", "site_dir": "site"}
    sections = {name: entries for section in config["nav"] for name, entries in section.items()}
    named = {page for entries in sections.values() for _, page in named_pages(entries)}
    if missing := named - set(gathered.pages):
        raise FileNotFoundError(f"the navigation names pages that do not exist: {', '.join(sorted(missing))}")
    for page in sorted(set(gathered.pages) - named):
        name = SECTIONS.get(page.partition("/")[0], "Extend")
        sections[name].append({title((gathered.folder / page).read_text()): page})
    return config


def release() -> str:
    """Return what the pages describe: the release, and the commit with its date if git knows it."""
    command = ["git", "-C", str(HERE), "log", "-1", "--format=%cs, commit %h"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # such as in an archive of the sources
        commit = ""
    return ", ".join(filter(None, [f"penstock {own_version()}", commit]))


def _run_zensical(folder: Path) -> None:
    """Run the generator, which aborts for a link between pages that leads nowhere."""
    program = Path(sys.executable).with_name("zensical")
    command = [str(program), "build", "--strict", "--clean", "-f", str(folder / "mkdocs.yml")]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", ran.stdout + ran.stderr))


def _give_worker(site: Path) -> None:
    """Write the source of the search into the script that starts it where the site is read from files."""
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    script = site / "docs/site/iframe-worker.js"
    source = json.dumps(worker.read_text()).replace("</", "<\\/")
    script.write_text(script.read_text().replace('"SEARCH"', source))


if __name__ == "__main__":
    wrong = build(Path(sys.argv[1]).resolve())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
