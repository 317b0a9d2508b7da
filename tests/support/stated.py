"""Figures that pages for users state."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.paths import ROOT

KB, MB, GB = 1e3, 1e6, 1e9

IMAGE = r"elsewhere, in ([\d]+) MB"
"""The size of the image without an engine, in ``deploy/README.md``."""


@dataclass(frozen=True)
class Stated:
    """A figure of a page: ``text`` is a regular expression with a group around the number."""

    page: str
    text: str
    measure: Callable[[], float]
    unit: float = 1
    """The factor from the number to the unit of ``measure``."""
    margin: float = 0.1
    """The share by which the page may differ, as the number is rounded and packages grow."""

    @property
    def stated(self) -> float:
        """The figure on the page; raises `ValueError` if it is not there once."""
        [found] = re.findall(self.text, " ".join((ROOT / self.page).read_text().split()))
        return float(found.replace(",", "")) * self.unit

    def holds(self, measured: float) -> bool:
        """Return True if the page is right about the figure, within the margin."""
        return abs(self.stated - measured) <= self.margin * measured

    def write(self, measured: float) -> None:
        """Write the figure into the page, with two digits that count."""
        page = ROOT / self.page
        text = page.read_text()
        [found] = re.finditer(self.text.replace(" ", r"\s+"), text)
        page.write_text(f"{text[: found.start(1)]}{float(f'{measured / self.unit:.2g}'):,g}{text[found.end(1) :]}")
