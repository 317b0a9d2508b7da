"""The files for deploying: valid by their schemas, and of one mind with the server about options, ports and times."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from pydantic_settings import CliApp

from penstock.api.app import Api
from penstock.api.cli.__main__ import main
from penstock.api.cli.sample_config import sample
from penstock.api.http.connections import IDLE_SECONDS
from penstock.api.settings import Settings
from penstock.api.socket.connection import LIFETIME
from penstock.pipeline import metrics
from penstock.pipeline.distribution import DISTRIBUTION, own_version
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
UNIT = (DEPLOY / "penstock.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PAGE = (DEPLOY / "README.md").read_text()
MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest for manifest in yaml.safe_load_all((DEPLOY / "kubernetes/penstock.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def interpolated(text: str) -> str:
    """Put defaults, or ``x`` for what has none, in place of the variables, as compose does."""
    return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", lambda found: found[3] if found[2] == "-" else "x", text)


def composed() -> Any:
    return yaml.safe_load(interpolated(COMPOSE))


def directives(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def environment_of_unit() -> dict[str, str]:
    return dict(word.split("=", 1) for line in directives("Environment") for word in line.split())


def environment_of_pod() -> dict[str, str]:
    return {
        entry["name"]: entry.get("value", "10.0.0.1").replace("$(POD_IP)", "10.0.0.1") for entry in CONTAINER["env"]
    }


def environment_of_compose(service: str) -> dict[str, str]:
    return {name: str(value) for name, value in composed()["services"][service]["environment"].items()}


STARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "compose gpu": (shlex.split(composed()["services"]["gpu"]["command"]), environment_of_compose("gpu")),
    "compose cpu": (shlex.split(composed()["services"]["cpu"]["command"]), environment_of_compose("cpu")),
    "kubernetes": (CONTAINER["args"], environment_of_pod()),
    "systemd": (shlex.split(directives("ExecStart")[0])[1:], environment_of_unit()),
}


def settings_of(start: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Read the settings as the server does in that container or unit."""
    (command, *arguments), environment = STARTS[start]
    assert command == "serve"
    image = dict(re.findall(r"(PENSTOCK_\w+)=(\S+)", DOCKERFILE)) if start != "systemd" else {}
    for name, value in (image | environment).items():
        if name.startswith("PENSTOCK_"):
            monkeypatch.setenv(name, value.replace("x", "0" * 64) if name == "PENSTOCK_SEAL_KEYS" else value)
    return CliApp.run(Settings, cli_args=arguments)


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


@pytest.mark.parametrize("start", STARTS)
def test_options_and_variables_are_settings_of_the_server(
    start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = settings_of(start, monkeypatch)
    assert settings.port == 8000
    assert settings.host == ("127.0.0.1" if start == "systemd" else "0.0.0.0")


def test_drain_ends_before_the_server_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    drains = {start: settings_of(start, monkeypatch).drain_timeout for start in STARTS}
    services = composed()["services"]
    asleep = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = {
        "compose gpu": seconds(services["gpu"]["stop_grace_period"]),
        "compose cpu": seconds(services["cpu"]["stop_grace_period"]),
        "kubernetes": POD["terminationGracePeriodSeconds"] - asleep,
        "systemd": seconds(directives("TimeoutStopSec")[0]),
    }
    assert {start: grace[start] - drain >= 15 for start, drain in drains.items()} == dict.fromkeys(STARTS, True)


@pytest.mark.parametrize("version", ["1.33", "1.37"])
@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifest_is_valid_kubernetes(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


def test_wrong_manifest_is_noticed() -> None:
    wrong = MANIFESTS["Service"] | {"spec": {"selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="selectr"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def parsed_compose(text: str) -> Any:
    composition = compose_spec.PyOptions(apply_merge=True).from_yaml(interpolated(text))
    composition.validate()
    return composition


def test_compose_file_is_valid() -> None:
    assert set(parsed_compose(COMPOSE).service_names()) == {"gpu", "cpu", "postgres", "prometheus", "grafana"}


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("read_only:", "readonly:", "readonly"),
        ("read_only: true", "read_only: perhaps", "perhaps"),
        ("networks:\n  default:\n", "", "default"),
    ],
)
def test_wrong_compose_file_is_noticed(right: str, wrong: str, error: str) -> None:
    assert right in COMPOSE
    with pytest.raises(ValueError, match=error):
        parsed_compose(wrong.join(COMPOSE.rsplit(right, 1)))


def test_compose_file_names_folders_that_exist() -> None:
    volumes = [volume for service in composed()["services"].values() for volume in service["volumes"]]
    mounted = {DEPLOY / volume.split(":")[0] for volume in volumes if volume.startswith(".")}
    assert [path for path in mounted if not path.is_dir()] == []


def test_stages_and_profiles_exist() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE))
    built = {name: service["build"] for name, service in composed()["services"].items() if "build" in service}
    assert {name: build["target"] for name, build in built.items()} == {"gpu": "gpu", "cpu": "cpu"}
    assert {"gpu", "cpu", *re.findall(r"--target (\w+)", PAGE)} <= stages
    assert {DEPLOY / build["context"] / build["dockerfile"] for build in built.values()} == {
        DEPLOY / "../deploy/Dockerfile"
    }


def test_probes_call_routes_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = {CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    called = set(re.findall(r"/(\w+)', timeout", DOCKERFILE))
    routes = set(re.findall(r'"(/\w+)"', Path(str(Api.app.__code__.co_filename)).read_text()))
    assert probed | {f"/{name}" for name in called} <= routes


def test_scrapes_reach_the_port_of_the_metrics() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    annotations = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    ports = {entry["name"]: entry["containerPort"] for entry in CONTAINER["ports"]}
    scraped = {int(annotations["prometheus.io/port"]), ports["metrics"], job["dns_sd_configs"][0]["port"]}
    served = {
        int(environment["PENSTOCK_METRICS_PORT"]) for _, environment in STARTS.values() if "PGPASSWORD" in environment
    }
    assert scraped == served == {int(environment_of_pod()["PENSTOCK_METRICS_PORT"])}


def test_autoscaler_counts_by_metrics_that_exist() -> None:
    counted = [metric["pods"]["metric"]["name"] for metric in MANIFESTS["HorizontalPodAutoscaler"]["spec"]["metrics"]]
    rules = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert [rule["name"]["as"] for rule in rules] == counted
    assert [rule["seriesQuery"].partition("{")[0] for rule in rules] == counted
    assert set(counted) <= {metric._name for metric in vars(metrics).values() if isinstance(metric, MetricWrapperBase)}


def test_kustomization_is_the_manifest() -> None:
    base = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert (base["kind"], base["resources"]) == ("Kustomization", ["penstock.yaml"])


def test_budget_and_service_select_the_pods() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    assert MANIFESTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels


def test_containers_and_unit_keep_what_sandboxes_need() -> None:
    compose, pod = composed()["services"]["gpu"], CONTAINER["securityContext"]
    assert {"seccomp=seccomp.json", "systempaths=unconfined", "apparmor=unconfined"} <= set(compose["security_opt"])
    assert (pod["procMount"], pod["appArmorProfile"], POD["hostUsers"]) == ("Unmasked", {"type": "Unconfined"}, False)
    assert not {
        "RestrictNamespaces",
        "ProtectHostname",
        "ProtectKernelTunables",
        "ProtectKernelLogs",
        "ProcSubset",
    } & set(re.findall(r"^(\w+)=", UNIT, re.MULTILINE))


def test_containers_give_the_server_no_rights() -> None:
    compose, pod = composed()["services"]["gpu"], CONTAINER["securityContext"]
    assert (compose["cap_drop"], compose["read_only"], compose.get("privileged")) == (["ALL"], True, None)
    assert "no-new-privileges:true" in compose["security_opt"]
    assert (pod["capabilities"], pod["readOnlyRootFilesystem"], pod["allowPrivilegeEscalation"]) == (
        {"drop": ["ALL"]},
        True,
        False,
    )
    user = POD["securityContext"]["runAsUser"]
    assert POD["securityContext"]["runAsNonRoot"] is True
    final = re.findall(r"^FROM server AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert {name: stage.rstrip().rsplit("\n", 1)[-1] for name, stage in final} == dict.fromkeys(
        ("plain", "cpu", "gpu"), f"USER {user}:{user}"
    )
    assert f"--uid {user} " in DOCKERFILE


def test_profile_denies_what_it_does_not_name() -> None:
    profile = json.loads((DEPLOY / "seccomp.json").read_text())
    (rule,) = profile["syscalls"]
    assert (profile["defaultAction"], rule["action"]) == ("SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW")
    named = {word for line in directives("SystemCallFilter") for word in line.split() if word[0] not in "@~"}
    assert named <= set(rule["names"])
    assert not {"bpf", "init_module", "kexec_load", "keyctl", "perf_event_open", "ptrace", "reboot"} & set(
        rule["names"]
    )


def test_dockerfile_copies_all_that_the_wheel_is_built_from() -> None:
    kept = set(re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    copied = {word for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    assert copied == kept
    assert [path for path in copied if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("environment", "file", "starts"),
    [
        ({}, "", False),
        ({}, "# model = 1\n[vllm]\n", False),
        ({}, sample(), False),
        ({}, 'model = ""\n', False),
        ({}, 'engine = [\n  "http://gpubox:8001",\n]\n', True),
        ({"PENSTOCK_MODEL": "openai/gpt-oss-20b"}, "", True),
        ({"PENSTOCK_ENGINE": "http://gpubox:8001"}, "", True),
        ({}, 'model = "openai/gpt-oss-20b"\n', True),
        ({}, 'engine = ["http://gpubox:8001"]\n', True),
        ({}, 'engine = "http://gpubox:8001"\n', True),
    ],
)
def test_unit_starts_only_with_a_model(environment: dict[str, str], file: str, starts: bool, tmp_path: Path) -> None:
    (command,) = re.findall(r"^ExecStartPre=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    if file:
        (tmp_path / "penstock.toml").write_text(file)
    words = shlex.split(command.replace("\\\n", " ").replace("$$", "$"))
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is starts
    assert starts or re.fullmatch(r"penstock: there is no model: set [^\n]+\n", done.stderr)


def test_unit_names_a_page_that_the_installation_brings() -> None:
    (documentation,) = directives("Documentation")
    assert documentation.startswith("file:/")
    assert re.search(rf"^install -D -m 644 (\S+) {documentation.removeprefix('file:')}$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("setting", ["prot = 3", 'port = "x"', "port ="])
def test_unit_does_not_try_a_wrong_setting_again(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text(setting)
    monkeypatch.setattr(sys, "argv", ["penstock", "serve"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert int(directives("RestartPreventExitStatus")[0]) == raised.value.code
    assert re.fullmatch(r"penstock: [^\n]+\n", capsys.readouterr().err)


def test_images_are_called_as_the_distribution() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)=("[^"]*"|\S+)', DOCKERFILE))
    assert (labels["title"], labels["version"], labels["licenses"]) == (DISTRIBUTION, own_version(), "Apache-2.0")
    assert labels["base.name"].endswith(re.findall(r"^ARG DEBIAN=(.+)$", DOCKERFILE, re.MULTILINE)[0])
    tags = {service["image"] for service in composed()["services"].values() if "build" in service} | {
        *re.findall(r"-t (\S+)", PAGE),
        CONTAINER["image"],
    }
    assert {tag.rpartition("-")[0] for tag in tags} == {f"{DISTRIBUTION}:{own_version()}"}


def test_page_links_to_files_that_exist() -> None:
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE) if not link.startswith(("https:", "#"))}
    assert [link for link in links if not (DEPLOY / link).exists()] == []


TIMEOUTS = {
    "nginx.conf": r"^    proxy_(?:read|send)_timeout (\d+)m;$",
    "envoy.yaml": r"^ +stream_idle_timeout: (\d+)s ",
}


@pytest.mark.parametrize(("file", "pattern"), TIMEOUTS.items())
def test_proxies_let_the_longest_socket_and_the_longest_silence_pass(file: str, pattern: str) -> None:
    """Caddy has no such limit by default."""
    text = (DEPLOY / "proxies" / file).read_text()
    found = [int(each) * (60 if file == "nginx.conf" else 1) for each in re.findall(pattern, text, re.MULTILINE)]
    assert found
    assert all(each > LIFETIME for each in found)


def test_proxies_close_idle_connections_before_the_server() -> None:
    """A request that a proxy sends on a connection that the server closes would fail."""
    (idle,) = re.findall(r"idle_timeout: (\d+)s\}", (DEPLOY / "proxies/envoy.yaml").read_text())
    assert int(idle) < IDLE_SECONDS
    assert "keepalive_timeout" not in (DEPLOY / "proxies/nginx.conf").read_text()  # 60 seconds by default


def test_first_supported_version_is_this_one_and_the_last_one_has_three_months() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    latest, previous = re.findall(r"^\| (\d+\.\d+)\.x \|", page, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    days = dict(re.findall(r"^## \[(\d+\.\d+)\.0\] - (\S+)$", changes, re.MULTILINE))
    assert list(days)[:2] == [latest, previous]
    assert own_version().startswith(f"{latest}.")
    [until] = re.findall(r"until (\S+) \|", page)
    assert 89 <= (date.fromisoformat(until) - date.fromisoformat(days[latest])).days <= 93


def test_no_file_turns_the_usage_reports_of_vllm_on() -> None:
    files = [ROOT / "Makefile", *(path for path in DEPLOY.rglob("*") if path.suffix != ".png" and path.is_file())]
    assert len(files) > 20
    assert [path for path in files if re.search("USAGE_STATS|DO_NOT_TRACK", path.read_text())] == []
