"""What lies in `deploy/`: every object holds to the published schema of its kind, and to what the server does.

Overlays are applied as Kustomize does, as far as they use it: patches of RFC 6902, and the deletion of a whole object.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headway_server.settings import ServerSettings

Objects = dict[tuple[str, str], dict[str, Any]]
OF_OPERATORS = {"ServiceMonitor", "ServingRuntime", "InferenceService"}
"""Kinds of custom resources, which Kubernetes itself publishes no schema of."""
SERVER_FIELDS = {name.upper() for name in ServerSettings.model_fields}


@pytest.fixture(scope="module")
def deploy(root: Path) -> Path:
    return root / "deploy"


COMPONENTS = ("components/autoscaler", "components/service-monitor")


def read(folder: Path) -> Objects:
    """Returns the objects of a folder of Kustomize, patched, by kind and name."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    version, kind = ("v1alpha1", "Component") if folder.parent.name == "components" else ("v1beta1", "Kustomization")
    assert (kustomization["apiVersion"], kustomization["kind"]) == (f"kustomize.config.k8s.io/{version}", kind)
    assert kustomization.keys() <= {"apiVersion", "kind", "resources", "patches"}
    objects: Objects = {}
    for resource in kustomization["resources"]:
        path = folder / resource
        if path.is_dir():
            objects |= read(path)
        else:
            found = [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
            objects |= {(one["kind"], one["metadata"]["name"]): one for one in found}
    for patch in kustomization.get("patches", ()):
        key = (patch["target"]["kind"], patch["target"]["name"])
        assert key in objects, key
        content = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
        if isinstance(content, dict):
            assert content["$patch"] == "delete"
            del objects[key]
        else:
            objects[key] = patched(objects[key], content)
    return objects


def patched(one: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """Applies a patch of RFC 6902, of which `add` and `replace` are used."""
    one = copy.deepcopy(one)
    for operation in operations:
        *above, last = operation["path"].strip("/").replace("~1", "/").split("/")
        place: Any = one
        for part in above:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            assert operation["op"] == "add" or last != "-"
            if last == "-":
                place.append(operation["value"])
            else:
                assert operation["op"] == "replace"
                place[int(last)] = operation["value"]
        else:
            assert operation["op"] == "add" or last in place, operation
            place[last] = operation["value"]
    return one


FOLDERS = ["base", "overlays/secrets", "overlays/fetch", "overlays/gpu"]


def test_the_base_applies_to_a_cluster_without_add_ons(deploy):
    kinds = {one["apiVersion"] for one in read(deploy / "kubernetes/base").values()}
    assert kinds == {"apps/v1", "v1", "policy/v1"}


@pytest.mark.parametrize("folder", [*FOLDERS, *COMPONENTS])
def test_every_object_holds_to_the_schema_of_its_kind(deploy, folder):
    objects = read(deploy / "kubernetes" / folder)
    assert objects
    for (kind, _), one in objects.items():
        if kind not in OF_OPERATORS:
            kubernetes_validate.validate(one, "1.37", strict=True)


def test_the_schemas_tell_a_misspelt_field(deploy):
    deployment = read(deploy / "kubernetes/base")["Deployment", "headway"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(deployment, "1.37", strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_mount_what_they_have_and_the_server_knows_its_settings(deploy, folder):
    pod = read(deploy / "kubernetes" / folder)["Deployment", "headway"]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert len(volumes) == len(pod["volumes"])
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"]
    [server] = pod["containers"]
    for variable in (one["name"].removeprefix("HEADWAY_") for one in server["env"]):
        group, _, field = variable.partition("__")
        assert group in SERVER_FIELDS
        if field:
            assert field.lower() in ServerSettings.model_fields[group.lower()].annotation.model_fields
    environment = {one["name"]: one["value"] for one in server["env"]}
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports["grpc"] == ServerSettings.model_fields["port"].default
    assert [str(ports[name]) for name in ("http", "health", "metrics")] == [
        environment[f"HEADWAY_{name}_PORT"] for name in ("HTTP", "HEALTH", "METRICS")
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["grpc"]["port"] == ports["health"]
    sleeps_s = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= sleeps_s + float(environment["HEADWAY_DRAIN_TIMEOUT"]) + 20


def test_services_budget_and_monitor_find_the_pods(deploy):
    objects = read(deploy / "kubernetes/base")
    labels = objects["Deployment", "headway"]["spec"]["template"]["metadata"]["labels"]
    ports = {
        port["name"] for port in objects["Deployment", "headway"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    for name in ("headway", "headway-http"):
        service = objects["Service", name]["spec"]
        assert service["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["ports"]} <= ports
    assert objects["Service", "headway"]["spec"]["clusterIP"] == "None"
    assert objects["PodDisruptionBudget", "headway"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    monitor = read(deploy / "kubernetes/components/service-monitor")["ServiceMonitor", "headway"]["spec"]
    service = objects["Service", "headway"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {one["port"] for one in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_the_autoscaler_scales_the_deployment_by_a_metric_that_the_server_tells(deploy):
    from headway_server.monitoring.metrics import FAMILIES

    objects = read(deploy / "kubernetes/base")
    spec = read(deploy / "kubernetes/components/autoscaler")["HorizontalPodAutoscaler", "headway"]["spec"]
    target = spec["scaleTargetRef"]
    assert (target["kind"], target["name"]) in objects
    assert "replicas" not in objects["Deployment", "headway"]["spec"]  # or each apply would set them back
    gauges = {family.name for family in FAMILIES if family.is_gauge}
    assert {one["pods"]["metric"]["name"] for one in spec["metrics"]} <= gauges


def test_the_runtime_of_kserve_holds_to_the_schema_of_a_container_and_the_flags_of_the_server(deploy):
    runtime = yaml.safe_load((deploy / "kserve/serving-runtime.yaml").read_text())
    service = yaml.safe_load((deploy / "kserve/inference-service.yaml").read_text())
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": runtime["spec"]["containers"]},
    }
    kubernetes_validate.validate(pod, "1.37", strict=True)
    [container] = runtime["spec"]["containers"]
    flags = container["args"][::2]
    assert {flag.removeprefix("--").replace("-", "_").upper() for flag in flags} <= SERVER_FIELDS
    given = dict(zip(flags, container["args"][1::2], strict=True))
    assert int(given["--port"]) == container["ports"][0]["containerPort"] == container["readinessProbe"]["grpc"]["port"]
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["modelFormat"]["name"] in {one["name"] for one in runtime["spec"]["supportedModelFormats"]}
