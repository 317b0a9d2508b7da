"""`docs/METRICS.md`, whose table is made from the metrics; ``--regen`` writes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.metrics import MetricWrapperBase

from penstock.extensions.workbench import shadow
from penstock.pipeline import metrics
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "METRICS.md"

HEAD = """# Metrics

`/metrics` reports, in the text format of Prometheus:

* vLLM's (`vllm:...`), if the engine runs in this process. With `--engine`, scrape the engines as well;
* those of penstock (`penstock_...`), listed below, and of the process (`process_open_fds`, ...);
* those of your own stages: make a `Counter` of `prometheus_client`, as [count_tokens.py](RECIPES.md#count-tokens) does.

```yaml
# prometheus.yml
scrape_configs:
  - job_name: penstock
    static_configs:
      - targets: ["127.0.0.1:8000"]
```

[A board and alert rules](../deploy/grafana/README.md) for Grafana and Prometheus show them.

**Who may read them.** All clients of a server without API keys. A server with keys wants one more, for Prometheus
alone: set `PENSTOCK_METRICS_KEY`, and `authorization: {credentials: ...}` in the job. Until it is set, every scrape
gets a 401. With `--metrics-port`, the metrics are on that port only, without a key: let only Prometheus reach it.

**Labels** never hold ids, texts of clients, or names that a client chooses. `--metrics-by-key` adds counters for each
API key, by its name, or the first 8 hex digits of its SHA-256 if it has none, as in the log.

**Several processes** that share a folder in `PROMETHEUS_MULTIPROC_DIR` are summed by each scrape, whichever answers it;
empty the folder before they start. Metrics of the process itself are left out then.

**Cost.** Nothing is measured per token but the first one of a stream. Gauges are set once a second and at each scrape.

Those without another type are counters; labels stand in brackets.

"""


METRICS = [value for value in (*vars(metrics).values(), *vars(shadow).values()) if isinstance(value, MetricWrapperBase)]


def rows() -> Iterator[str]:
    for metric in METRICS:
        name = metric._name + ("_total" if metric._type == "counter" else "")
        kind = "" if metric._type == "counter" else f", {metric._type}"
        labels = f" ({', '.join(f'`{label}`' for label in metric._labelnames)})" if metric._labelnames else ""
        yield f"* `{name}`{kind}{labels}: {metric._documentation}\n"


def test_page_lists_the_metrics(pytestconfig: pytest.Config) -> None:
    page = HEAD + "".join(rows())
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_every_metric_begins_with_the_name_of_the_project() -> None:
    named = [metric._name for metric in METRICS]
    assert len(named) > 30
    assert all(name.startswith("penstock_") for name in named)
