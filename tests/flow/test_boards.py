"""The Grafana board and the alert rules name only metrics that exist, with labels that they have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from penstock.pipeline import metrics
from tests.support import boards
from tests.support.paths import ROOT

PAGE = (ROOT / "deploy/grafana/README.md").read_text()

SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
"""The endings of the names of a metric's series, by its type."""

EVERYWHERE = {"job", "instance", "le"}
"""The labels that Prometheus adds, and that of the buckets of histograms."""


def own_metrics() -> list[MetricWrapperBase]:
    return [metric for metric in vars(metrics).values() if isinstance(metric, MetricWrapperBase)]


def series_of(metric: MetricWrapperBase) -> set[str]:
    return {metric._name + end for end in SERIES[str(metric._type)]}


def own_series() -> Mapping[str, set[str]]:
    """Return the labels of each series of penstock's, and of those about the process, by name."""
    series = {name: set(metric._labelnames) for metric in own_metrics() for name in series_of(metric)}
    of_process = {
        sample.name for family in REGISTRY.collect() for sample in family.samples if family.name.startswith("process_")
    }
    return series | {name: set[str]() for name in (*of_process, "up")}


def vllm_series() -> Mapping[str, set[str]]:
    """Return the labels of the board's choice for each series of vLLM's, by name, read from its source."""
    vllm = find_spec("vllm")
    assert vllm
    assert vllm.origin
    source = Path(vllm.origin).with_name("v1").joinpath("metrics", "loggers.py").read_text()
    named = re.findall(r"_(counter|gauge|histogram)_cls\(\s*name=\"(vllm:\w+)\"", source)
    return {name + end: {"model_name"} for kind, name in named for end in SERIES[kind]}


@pytest.fixture(scope="module")
def known() -> Mapping[str, set[str]]:
    return {**own_series(), **vllm_series()}


@pytest.mark.parametrize("panel", boards.panels(), ids=lambda panel: panel.title)
def test_panel_names_only_metrics_and_labels_that_exist(panel: boards.Panel, known: Mapping[str, set[str]]) -> None:
    for query, legend in panel.queries:
        names = boards.metrics_in(query)
        assert names
        assert names <= known.keys()
        labels = EVERYWHERE.union(*(known[name] for name in names))
        assert boards.labels_in(query) <= labels
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels


@pytest.mark.parametrize("alert", boards.alerts(), ids=lambda alert: alert["alert"])
def test_alert_names_only_metrics_and_labels_that_exist(alert: dict[str, str]) -> None:
    own = own_series()
    names = boards.metrics_in(alert["expr"])
    assert names
    assert names <= own.keys()
    assert boards.labels_in(alert["expr"]) <= EVERYWHERE.union(*(own[name] for name in names))


def test_variables_of_the_board_name_metrics_that_exist() -> None:
    queries = [variable["query"] for variable in boards.board()["templating"]["list"] if variable["type"] == "query"]
    named = [re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", query["query"]) for query in queries]
    assert named
    own = own_series()
    for match in named:
        assert match
        assert match[2] in EVERYWHERE | own[match[1]]


def test_every_metric_is_on_the_board() -> None:
    """One look says what is slow, for whom, and why."""
    shown = {name for panel in boards.panels() for query, _ in panel.queries for name in boards.metrics_in(query)}
    missing = {metric._name for metric in own_metrics() if not shown & series_of(metric)}
    assert missing == {
        "penstock_http_request_duration_seconds",  # that of a stream is the time of its response
        "penstock_time_to_first_event_seconds",  # the first token is what its reader waits for
        "penstock_compactions",
        "penstock_webhooks",  # few servers have a receiver
        "penstock_oldest_queued_seconds",  # has an alert
    }


def test_page_lists_the_alerts() -> None:
    assert re.findall(r"^\| `(Penstock\w+)` \|", PAGE, re.MULTILINE) == [alert["alert"] for alert in boards.alerts()]


def test_panels_have_titles_and_descriptions_of_their_own() -> None:
    titles = [panel.title for panel in boards.panels()]
    assert len(set(titles)) == len(titles)
    assert all(panel.description.endswith(".") for panel in boards.panels())
    ids = [panel["id"] for panel in boards.board()["panels"]]
    assert len(set(ids)) == len(ids)


APIS = ("Responses", "Chat Completions", "Completions", "Messages")
ABOUT = {
    "deploy/grafana/penstock.json": r'^ "description": "(.*)"',
    "deploy/penstock.service": r"^Description=(.*)",
    "pyproject.toml": r'^description = "(.*)"',
    "api/http/openapi.py": r'"summary": "(.*)"',
    "api/http/front/front.html": r'<p id="about">(.*)',
}
"""What says in one line what penstock is."""


@pytest.mark.parametrize(("file", "line"), ABOUT.items())
def test_description_names_all_apis_or_none(file: str, line: str) -> None:
    [said] = re.findall(line, (ROOT / file).read_text(), re.MULTILINE)
    assert {api in said for api in APIS} in ({True}, {False})
