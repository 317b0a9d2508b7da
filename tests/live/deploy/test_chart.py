"""The Helm chart: valid for all kinds of values, of one mind with the server, and the source of the plain manifest."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic_settings import CliApp

from penstock.api.settings import Settings
from tests.support.charts import CHART, findings, helm, rendered, rendered_files
from tests.support.paths import ROOT

MANIFEST = ROOT / "deploy/kubernetes/penstock.yaml"
HEADER = (
    "# Two servers over one PostgreSQL database, as the Helm chart writes them: `make test-deploy ARGS=--regen`.\n"
    "# README.md in the folder above names what they need.\n"
)
ORDER = ("service", "deployment", "disruption", "autoscaling", "network")
VERSIONS = ("1.33", "1.37")

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "engines": {"model": "", "engines": ["http://gpubox:8001", "http://gpubox:8002"]},
    "secret of the store": {"store": {"secret": "database", "key": "uri"}, "secret": ""},
    "keda": {"autoscaling": {"kind": "keda"}},
    "none": {"autoscaling": {"kind": "none"}, "replicas": 3},
    "one metric": {"autoscaling": {"metrics": {"penstock_responses_running": None}}},
    "monitor": {"metrics": {"serviceMonitor": True, "labels": {"release": "prometheus"}, "port": 9500}},
    "plain sandbox": {"sandbox": False, "networkPolicy": False},
    "settings": {
        "settings": {
            "keep-alive": "10s",
            "max-body-bytes": 67_108_864,
            "detach": True,
            "trusted-proxy": ["10.0.0.0/8", "fd00::/8"],
        }
    },
    "places": {
        "home": {"claim": "models"},
        "volumes": [{"name": "limits", "configMap": {"name": "limits"}}],
        "volumeMounts": [{"name": "limits", "mountPath": "/etc/penstock"}],
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"team": "llm"},
        "imagePullSecrets": [{"name": "registry"}],
        "gpus": 8,
        "args": ["--tensor-parallel-size", "8"],
        "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"lb": "internal"}},
        "image": {"repository": "registry.example/penstock-llm", "tag": "0.3.0-gpu@sha256:" + "0" * 64},
        "maxUnavailable": "50%",
    },
}
CUSTOM = ("ServiceMonitor", "ScaledObject")
"""Kinds of other projects, whose schemas are not those of Kubernetes."""


def pod_of(manifests: dict[str, Any]) -> Any:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def settings_of(manifests: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Read the settings as the server does in such a pod."""
    (container,) = pod_of(manifests)["containers"]
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", "postgresql://x").replace("$(POD_IP)", "10.0.0.1"))
    command, *arguments = container["args"]
    assert command == "serve"
    return CliApp.run(Settings, cli_args=arguments)


@pytest.mark.parametrize("case", CASES)
def test_chart_is_valid(case: str) -> None:
    assert findings(CASES[case]) == []
    manifests = rendered(CASES[case], "my-release")
    for kind, manifest in manifests.items():
        assert manifest["metadata"]["name"] == "my-release-penstock"
        for version in VERSIONS:
            if kind not in CUSTOM:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_plain_manifest_is_the_chart_with_its_defaults(pytestconfig: pytest.Config) -> None:
    files = rendered_files()
    assert set(files) == {*(f"{name}.yaml" for name in ORDER), "tests/ready.yaml", "NOTES.txt"}
    manifest = HEADER + "\n---\n".join(files[f"{name}.yaml"] for name in ORDER) + "\n"
    if pytestconfig.getoption("--regen"):
        MANIFEST.write_text(manifest)
    assert MANIFEST.read_text() == manifest


@pytest.mark.parametrize("case", CASES)
def test_settings_of_the_server_are_those_of_the_values(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    values = CASES[case]
    settings = settings_of(rendered(values), monkeypatch)
    assert settings.drain_timeout == 300
    assert settings.engine == values.get("engines", [])
    assert settings.metrics_port == values.get("metrics", {}).get("port", 9400)
    if wanted := values.get("settings"):
        assert (settings.keep_alive, settings.max_body_bytes, settings.detach, settings.trusted_proxy) == (
            10,
            wanted["max-body-bytes"],
            True,
            wanted["trusted-proxy"],
        )


def test_database_may_be_in_a_secret() -> None:
    (container,) = pod_of(rendered(CASES["secret of the store"]))["containers"]
    (store,) = (entry for entry in container["env"] if entry["name"] == "PENSTOCK_STORE")
    assert store == {"name": "PENSTOCK_STORE", "valueFrom": {"secretKeyRef": {"name": "database", "key": "uri"}}}
    assert "envFrom" not in container


def test_pod_with_engines_elsewhere_has_no_gpu_and_the_plain_image() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for case, (image, gpus) in {"engines": ("plain", None), "defaults": ("gpu", "1")}.items():
        (container,) = pod_of(rendered(CASES[case]))["containers"]
        assert container["image"] == f"penstock-llm:{version}-{image}"
        for kind in ("requests", "limits"):
            assert container["resources"][kind].get("nvidia.com/gpu") == gpus


@given(st.integers(0, 10_000), st.integers(1, 600))
def test_pod_lives_until_its_drain_has_ended(drain: int, leaving: int) -> None:
    pod = pod_of(rendered({"drainSeconds": drain, "leavingSeconds": leaving}))
    (container,) = pod["containers"]
    asleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert (asleep, pod["terminationGracePeriodSeconds"]) == (leaving, leaving + drain + 15)
    assert {"name": "PENSTOCK_DRAIN_TIMEOUT", "value": f"{drain}s"} in container["env"]


@given(st.from_regex(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True))
def test_every_release_has_names_that_are_valid(release: str) -> None:
    manifests = rendered({}, release)
    name = manifests["Deployment"]["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
    selector = {"app": name}
    assert manifests["Service"]["spec"]["selector"] == selector
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == selector
    assert manifests["Deployment"]["spec"]["template"]["metadata"]["labels"] == selector
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == selector


def test_keda_asks_for_metrics_that_exist() -> None:
    scaled = rendered(CASES["keda"], "chat")["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"] == {"name": "chat-penstock"}
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    asked = [re.fullmatch(r'sum\((\w+)\{namespace="default",pod=~"chat-penstock-\.\*"\}\)', query) for query in queries]
    assert {found and found[1] for found in asked} == {"penstock_responses_running", "penstock_turns_waiting"}
    known = re.findall(r"^\* `(\w+)`, gauge\b", (ROOT / "docs/METRICS.md").read_text(), re.MULTILINE)
    assert {found and found[1] for found in asked} <= set(known)
    assert "HorizontalPodAutoscaler" not in rendered(CASES["keda"])


def test_monitor_selects_the_service_and_its_port() -> None:
    manifests = rendered(CASES["monitor"])
    monitor, service = manifests["ServiceMonitor"], manifests["Service"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert ports[endpoint["port"]] == 9500
    assert manifests["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scrape"] == "false"


def test_replicas_are_left_to_the_autoscaler() -> None:
    assert rendered(CASES["none"])["Deployment"]["spec"]["replicas"] == 3
    for case in ("defaults", "keda"):
        assert "replicas" not in rendered(CASES[case])["Deployment"]["spec"]


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "x"},
        {"gpus": "1"},
        {"gpus": -1},
        {"engines": ["gpubox:8001"]},
        {"settings": {"store": "none"}},
        {"settings": {"peer-url": "http://x"}},
        {"settings": {"Keep_Alive": "10s"}},
        {"store": {"url": "sqlite.db"}},
        {"autoscaling": {"kind": "vpa"}},
        {"autoscaling": {"metrics": {"penstock_turns_waiting": "4"}}},
        {"image": {"tagg": "1"}},
        {"metrics": {"port": 70_000}},
        {"replicas": 0},
        {"home": {"size": "big"}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm().HelmError, match="- at '"):
        rendered(values)
    assert findings(values)


def test_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (chart["version"], chart["appVersion"]) == (version, version)
