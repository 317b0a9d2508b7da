"""A real Prometheus scrapes a real server, and answers the queries of the board and of the alerts."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support import boards
from tests.support.processes import wait_for
from tests.support.prometheus import Prometheus, Series, program, running_prometheus
from tests.support.serve_command import WEATHER, Command

WITHOUT_DATA = {
    *(
        "Failed",
        "Why responses failed or are incomplete",
        "Refused requests",
        "Repairs of Harmony",
        "Calls",
        "Time of a call",
    ),
    *("Tokens by API key", "Responses by API key"),
    *("State of each model", "Waiting for a model", "Starts and stops of models"),
    *("Results of lines", "Tokens of lines", "Hints"),
}
"""Panels of events that did not happen here, of several models, of batches, and of hints."""


@pytest.fixture(scope="module")
def prometheus(server: Command, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, which has seen some responses of the server before and after its first scrapes."""
    with running_prometheus(server.url, tmp_path_factory.mktemp("prometheus")) as prometheus:
        for _ in range(3):
            load(server.client)
            wait_for_scrapes(prometheus, 2)
        yield prometheus


def load(client: openai.OpenAI) -> None:
    def stream(text: str) -> None:
        with client.responses.stream(model="tiny-gpt-oss", input=text) as events:
            for _ in events:
                pass

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(stream, ["Say hello.", "Remember the number seven."] * 3))
    weather: Any = [WEATHER]
    client.responses.create(model="tiny-gpt-oss", input="What is the weather in Paris?", tools=weather)


def wait_for_scrapes(prometheus: Prometheus, number: int) -> None:
    wanted = scraped(prometheus) + number
    wait_for(lambda: scraped(prometheus) >= wanted)


def scraped(prometheus: Prometheus) -> int:
    counted = prometheus.query('count_over_time(up{job="penstock"}[1h])')
    return int(counted[0]["value"][1]) if counted else 0


def values(series: Series) -> list[float]:
    return [number for each in series if not math.isnan(number := float(each["value"][1]))]


def test_prometheus_answers_a_query_for_the_time_to_first_token(prometheus: Prometheus) -> None:
    wait_for(lambda: values(prometheus.query('up{job="penstock"}')) == [1])  # a scrape may take longer than its second
    query = "histogram_quantile(0.95, sum by (le) (rate(penstock_time_to_first_token_seconds_bucket[1h])))"
    (seconds,) = values(prometheus.query(query))
    assert seconds > 0
    (clients,) = values(prometheus.query("sum(penstock_time_to_first_token_seconds_count)"))
    assert clients >= 18
    assert values(prometheus.query("sum(vllm:time_to_first_token_seconds_count)"))[0] >= clients


def test_prometheus_answers_each_query_of_the_board(prometheus: Prometheus, server: Command) -> None:
    """The server samples the responses that run from time to time, so that it has to meet one."""

    def empty() -> set[str]:
        return {panel.title for panel in boards.panels() if not any(map(found, panel.queries))}

    def found(query: tuple[str, object]) -> list[float]:
        return values(prometheus.query(boards.chosen(query[0], 60)))

    def is_complete() -> bool:
        load(server.client)
        return empty() <= WITHOUT_DATA

    wait_for(is_complete)


def test_rules_are_healthy_and_no_alert_fires(prometheus: Prometheus) -> None:
    wait_for(lambda: all(rule["health"] != "unknown" for rule in prometheus.ask("rules")["groups"][0]["rules"]))
    (group,) = prometheus.ask("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert["alert"] for alert in boards.alerts()]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert "firing" not in {rule["state"] for rule in group["rules"]}  # on a busy machine, one may be pending


def test_each_alert_fires_when_it_should() -> None:
    """`promtool` checks the rules, with made-up series."""
    for command in (("check", "rules", boards.ALERTS), ("test", "rules", boards.ALERTS.with_name("test_alerts.yml"))):
        done = subprocess.run([program("promtool"), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = boards.ALERTS.with_name("test_alerts.yml").read_text()
    assert all(f"alertname: {alert['alert']}\n" in tested for alert in boards.alerts())
