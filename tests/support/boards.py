"""The Grafana board and the alert rules of ``deploy``, and the names of metrics in their queries."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml

from tests.support.paths import ROOT

BOARD = ROOT / "deploy/grafana/penstock.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"

_LABELS = r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)"
_WORDS = {"or", "and", "unless", "offset", "by", "without", "on", "ignoring", "bool", "inf", "nan"}


class Panel(NamedTuple):
    """A panel of the board."""

    title: str
    kind: str
    description: str
    queries: tuple[tuple[str, str], ...]
    """Each query, with the legend of its series."""
    unit: str


def board() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(BOARD.read_text())
    return value


def panels() -> list[Panel]:
    return [_panel(panel) for panel in board()["panels"] if panel["type"] != "row"]


def _panel(panel: dict[str, Any]) -> Panel:
    queries = tuple((target["expr"], target["legendFormat"]) for target in panel["targets"])
    return Panel(panel["title"], panel["type"], panel["description"], queries, panel["fieldConfig"]["defaults"]["unit"])


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def metrics_in(query: str) -> set[str]:
    """Return the names of the series that a query reads."""
    bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|"[^"]*"|#.*', " ", re.sub(_LABELS, " ", query))
    names: set[str] = set(re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*\b(?!\s*\()", re.sub(r"offset\s+\w+", " ", bare)))
    return names - _WORDS


def chosen(query: str, seconds: int) -> str:
    """Return a query with the board's variables replaced: all servers, and rates over that many seconds."""
    everything = re.sub(r"\$(job|instance|model)\b", ".*", query)
    return re.sub(r"\$__(rate_interval|range)\b", f"{seconds}s", everything)


def labels_in(query: str) -> set[str]:
    """Return the labels that a query names."""
    named = {label.strip() for labels in re.findall(_LABELS, query) for label in labels.split(",")}
    return named | set(re.findall(r"(\w+)\s*=~?\s*\"", query))
