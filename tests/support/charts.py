"""The Helm chart, rendered by Helm itself: its library comes as a wheel, which ``make test-deploy`` unpacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from tests.support.paths import ROOT

HELM = ROOT / ".cache/deploy/helm"
CHART = ROOT / "deploy/helm/penstock-llm"


@cache
def helm() -> Any:
    """Return the module of Helm."""
    sys.path.append(str(HELM))
    return importlib.import_module("helm_python")


def findings(values: Mapping[str, Any] | None = None) -> list[str]:
    """Return what `helm lint --strict` finds, but for hints."""
    found = helm().lint(CHART, dict(values or {}), strict=True)
    return [*found["errors"], *(message["error"] for message in found["messages"] if message["severity"] > 1)]


def rendered_files(values: Mapping[str, Any] | None = None, name: str = "penstock") -> dict[str, str]:
    """Render the chart, as `helm template` does; return the files that have content, by name."""
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema(dict(values or {}))
        files = chart.render(dict(values or {}), name=name, namespace="default")
    return {file.partition("/templates/")[2]: text.strip() for file, text in files.items() if text.strip()}


def rendered(values: Mapping[str, Any] | None = None, name: str = "penstock") -> dict[str, Any]:
    """Render the chart; return its manifests by kind, but for the pod of its test."""
    files = rendered_files(values, name)
    manifests = [
        yaml.safe_load(text) for file, text in files.items() if file.endswith(".yaml") and "tests/" not in file
    ]
    return {manifest["kind"]: manifest for manifest in manifests}
