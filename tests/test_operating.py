"""What docs/operating.md and deploy/ say holds: limits, errors, metrics, probes, the time a stop takes."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from service.errors import RETRY_AFTER_S, STATUS
from service.metrics import FALLBACK_REASONS, Metrics
from service.settings import Settings, load
from service.watch import ANSWER_S, END_S

ROOT = Path(__file__).parents[1]
OPERATING = (ROOT / "docs/operating.md").read_text()
STOP_S = 10  # what README and docs/operating.md promise
MANIFESTS = [
    document
    for name in ("kubernetes", "kserve-runtime")
    for document in yaml.safe_load_all((ROOT / f"deploy/{name}.yaml").read_text())
]


def manifest(kind: str) -> Any:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


POD = manifest("Deployment")["spec"]["template"]["spec"]
CONTAINERS = [POD["containers"][0], manifest("ServingRuntime")["spec"]["containers"][0]]


@pytest.mark.parametrize("code", STATUS)
def test_every_error_code_has_a_heading_with_its_status_and_when_to_try_again(code: str) -> None:
    (text,) = re.findall(rf"^### `{code}`\n\n(.*?)(?=\n#)", OPERATING, re.DOTALL | re.MULTILINE)
    retry = RETRY_AFTER_S.get(code)
    assert text.startswith(f"{STATUS[code]}." if retry is None else f"{STATUS[code]}, `Retry-After: {retry}`.")


def test_no_heading_is_of_an_error_that_there_is_not() -> None:
    assert re.findall(r"^### `(\w+)`", OPERATING, re.MULTILINE) == list(STATUS)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_named(name: str) -> None:
    assert re.search(rf"--{name.replace('_', '-')}(?![\w-])", OPERATING)


def test_every_flag_of_the_table_of_limits_is_a_setting() -> None:
    flags = re.findall(r"^\| `--([\w-]+)`", OPERATING, re.MULTILINE)
    assert len(flags) == 8
    assert {flag.replace("-", "_") for flag in flags} <= set(Settings.model_fields)


def test_the_metrics_are_those_that_there_are_with_their_labels() -> None:
    def labels_of(samples: list[Any]) -> set[str]:
        return {label for sample in samples for label in sample.labels} - {"le"}

    metrics = Metrics(("eager",), 1)
    there = {
        f"{each.name}_total" if each.type == "counter" else each.name: labels_of(each.samples)
        for each in metrics.collect()
    }
    shown = re.findall(r"^\| `(mlp_\w+)(?:\{([\w,]+)\})?`", OPERATING, re.MULTILINE)
    assert {name: set(filter(None, labels.split(","))) for name, labels in shown} == there
    for reason in FALLBACK_REASONS:
        assert re.search(rf"^\| `{reason}` \|", OPERATING, re.MULTILINE)


def test_no_service_beside_it_passes_for_a_setting() -> None:
    assert POD["enableServiceLinks"] is False


@pytest.mark.parametrize("version", ["1.25", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("kind", ["Deployment", "Service", "HorizontalPodAutoscaler"])
def test_a_manifest_is_what_kubernetes_schema_asks_for(kind: str, version: str) -> None:
    kubernetes_validate.validate(manifest(kind), version, strict=True)


def test_every_manifest_is_held_to_a_schema() -> None:
    assert {each["kind"] for each in MANIFESTS} == {
        "Deployment",
        "Service",
        "HorizontalPodAutoscaler",
        "ServingRuntime",
    }


def test_a_field_that_kubernetes_does_not_have_is_seen() -> None:
    deployment = copy.deepcopy(manifest("Deployment"))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["route"] = "/"
    with pytest.raises(kubernetes_validate.ValidationError, match="route"):
        kubernetes_validate.validate(deployment, "1.25", strict=True)


def test_the_runtimes_containers_are_what_kubernetes_schema_asks_for() -> None:
    spec = {"containers": manifest("ServingRuntime")["spec"]["containers"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.slow
def test_the_runtime_is_what_kserves_types_ask_for(tmp_path: Path) -> None:
    runtime = ROOT / "deploy/kserve-runtime.yaml"
    assert judged(runtime) == (0, [])
    wrong = tmp_path / "wrong.yaml"
    text = runtime.read_text().replace("protocolVersions: [v2]", "protocolVersion: [v2]")
    wrong.write_text(text.replace("multiModel: false", "multiModel: no one").replace("  containers:", "  container:"))
    status, said = judged(wrong)
    assert status == 1
    assert "V1alpha1ServingRuntime.spec.protocolVersion: V1alpha1ServingRuntimeSpec has no such field" in said
    assert "V1alpha1ServingRuntime.spec.multiModel: expected bool, got 'no one'" in said
    assert "V1alpha1ServingRuntime.spec: Invalid value for `containers`, must not be `None`" in said


def judged(runtime: Path) -> tuple[int, list[str]]:
    """The status, and the lines, of what holds a manifest to KServe's types."""
    judge = [ROOT / ".judges/bin/python", ROOT / "tests/service/judges/kserve_manifest.py"]
    done = subprocess.run([*judge, runtime, "V1alpha1ServingRuntime"], capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.parametrize("container", CONTAINERS, ids=("kubernetes", "kserve"))
def test_a_manifests_probes_leave_time_and_its_limits_room(container: Any) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["timeoutSeconds"] < container[probe]["periodSeconds"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300  # a first start compiles, for minutes
    wants, may = container["resources"]["requests"], container["resources"]["limits"]
    assert int(wants["cpu"]) <= int(may["cpu"])
    assert int(wants["memory"].removesuffix("Gi")) <= int(may["memory"].removesuffix("Gi"))


def test_every_folder_that_is_mounted_has_a_volume_and_what_is_written_has_a_folder() -> None:
    mounts = {each["name"]: each["mountPath"] for each in CONTAINERS[0]["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in POD["volumes"]}
    assert CONTAINERS[0]["securityContext"]["readOnlyRootFilesystem"]
    (cache,) = re.findall(r"MLP_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    assert set(mounts.values()) == {cache, "/tmp"}  # noqa: S108  the container's


@pytest.mark.parametrize("container", CONTAINERS, ids=("kubernetes", "kserve"))
def test_a_manifests_ports_flags_and_variables_are_the_servers(container: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in container.get("env", []):
        monkeypatch.setenv(variable["name"], variable["value"])
    settings = load([*container["args"], "--model", "digits"])
    assert [port["containerPort"] for port in container["ports"]] == [settings.port]
    assert f"EXPOSE {settings.port}\n" in (ROOT / "Dockerfile").read_text()
    for variable in container.get("env", []):
        assert variable["name"].removeprefix("MLP_").lower() in Settings.model_fields
    assert float(container["resources"]["limits"]["cpu"]).is_integer()
    assert (
        f"--uid {container['securityContext'].get('runAsUser', POD['securityContext']['runAsUser'])} "
        in (ROOT / "Dockerfile").read_text()
    )


@pytest.mark.parametrize("container", CONTAINERS, ids=("kubernetes", "kserve"))
def test_a_manifests_probes_ask_routes_that_need_no_key(container: Any, client: httpx.Client) -> None:
    from service.http import OPEN_PATHS

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{probe}Probe"]["httpGet"]
        assert asked["path"] == f"/v2/health/{path}"
        assert asked["path"] in OPEN_PATHS
        assert client.get(asked["path"]).status_code == 200
        assert ports.get(asked["port"], asked["port"]) == 8000


def test_the_grace_period_covers_the_hook_and_the_stop() -> None:
    command = CONTAINERS[0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert ANSWER_S < END_S < STOP_S
    assert POD["terminationGracePeriodSeconds"] >= int(command[1]) + STOP_S
    told = " ".join(OPERATING.split())  # wherever its lines are broken
    assert f"within {STOP_S} seconds" in told
    assert f"{ANSWER_S:g} seconds" in told


def test_the_service_and_the_autoscaler_reach_the_deployment() -> None:
    deployment, service = manifest("Deployment"), manifest("Service")
    autoscaler = manifest("HorizontalPodAutoscaler")["spec"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in CONTAINERS[0]["ports"]}
    assert autoscaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert 1 <= autoscaler["minReplicas"] <= autoscaler["maxReplicas"]
    assert "replicas" not in deployment["spec"]  # the autoscaler's to say
    (pods,) = [each["pods"] for each in autoscaler["metrics"] if each["type"] == "Pods"]
    assert pods["metric"]["name"] in {each.name for each in Metrics(("eager",), 1).collect() if each.type == "gauge"}
    assert int(pods["target"]["averageValue"]) == load([]).queue_rows("cpu") // 4


def test_prometheus_is_pointed_at_the_metrics(client: httpx.Client) -> None:
    annotations = manifest("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert client.get(annotations["prometheus.io/path"]).status_code == 200
    assert annotations["prometheus.io/port"] == str(CONTAINERS[0]["ports"][0]["containerPort"])
