"""The Helm chart renders valid Kubernetes objects, consistent with each other and with the services."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import helm_python
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdec.serving.process.health import LIVE
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    SMALL,
    SOURCES,
    VERSIONS,
    Object,
    at,
    chart,
    config,
    container,
    labels,
    merged,
    of_kind,
    problems,
    render,
    role,
    selects,
    services,
    templates,
    text,
)
from tests.deploy.chart_values import COMBINATIONS, COMMANDS, EVERYTHING, EXAMPLE_VALUES, PORTS, VOLUMES, WHOLE
from tests.examples import examples

SERVICES = {
    "verifier": verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    "orchestrator": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
}


class TestWhatIsRendered:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("example", EXAMPLE_VALUES)
    def test_examples_are_valid(self, example: str, version: str) -> None:
        things = render(EXAMPLE_VALUES[example])
        assert [each for thing in things for each in problems(thing, version)] == []
        holds_together(things)

    @pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS.keys())
    def test_combinations_are_valid(self, values: Object) -> None:
        things = render(values)
        assert [each for thing in things for version in VERSIONS for each in problems(thing, version)] == []
        holds_together(things)

    @pytest.mark.parametrize("values", WHOLE.values(), ids=WHOLE.keys())
    def test_lint_finds_nothing(self, values: Object) -> None:
        report = helm_python.lint(CHART, values, strict=True, namespace=NAMESPACE)
        assert report["errors"] == []
        assert [each for each in report["messages"] if each["severity"] >= 2] == []

    def test_everything_is_everything(self) -> None:
        """So tests with EVERYTHING cover every template, and every kind with a schema in `schemas`."""
        rendered = text(EVERYTHING)
        assert [name for name, content in rendered.items() if not content.strip() and ".tpl" not in name] == []
        kinds = {each["kind"] for each in render(EVERYTHING)}
        assert kinds >= {path.stem for path in (Path(__file__).parent / "schemas").glob("*.json")}

    @pytest.mark.parametrize("kind", ["Deployment", "PodMonitor", "Unknown"])
    def test_what_is_wrong_would_be_found(self, kind: str) -> None:
        thing = of_kind(render(EVERYTHING), "Deployment" if kind == "Unknown" else kind).popitem()[1]
        assert problems(thing, VERSIONS[0]) == []
        wrong = thing | {"kind": kind, "spec": thing["spec"] | {"replica": 1}}
        assert len(problems(wrong, VERSIONS[0])) == 1

    def test_what_stands_in_variables_stays_there(self) -> None:
        """Secrets belong in a Secret; a secret in `env` is at least not copied to a ConfigMap."""
        told = {"env": [{"name": "TOKEN", "value": "hunter2"}]}
        download = {"download": {"image": "example.org/fetch:1", "sizeLimit": "9Gi", **told}}
        things = render(merged(SMALL | SOURCES | {"modelVolume": download}, at("defaults", told)))
        assert {each["kind"] for each in things if "hunter2" in json.dumps(each)} == {"Deployment"}

    @given(data=st.data())
    @settings(max_examples=examples(10), phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    def test_any_combination(self, data: st.DataObject) -> None:
        values, release = data.draw(some_values()), data.draw(st.sampled_from(["specdec", "s" * 53, "a-b"]))
        things = render(values, release)
        assert [each for thing in things for each in problems(thing, VERSIONS[-1])] == []
        holds_together(things)


@st.composite
def some_values(draw: st.DrawFn) -> Object:
    """Draw values that the chart accepts."""
    flag, few = st.booleans(), st.integers(1, 4)
    tls = draw(st.sampled_from(["none", "secrets", "certManager"]))
    gpus = draw(st.sampled_from([0, 1, 4]))
    has_openai = draw(flag)

    def autoscaling(targets: Object | None = None) -> Object:
        low = draw(few)
        found = {
            "type": draw(st.sampled_from(["none", "hpa", "keda"])),
            "minReplicas": low,
            "maxReplicas": low + draw(few),
        }
        return found if targets is None or draw(flag) else found | {"targets": targets}

    def pod() -> Object:
        return {
            "replicas": draw(few),
            "preStopSeconds": draw(st.integers(0, 20)),
            "drainSeconds": draw(st.integers(0, 600)),
            "startupSeconds": draw(st.integers(5, 7200)),
            "pdb": {"enabled": draw(flag), "maxUnavailable": draw(st.sampled_from([1, "20%"]))},
        }

    verifiers = pod() | {
        "gpus": gpus,
        "options": {"engine": "vllm" if gpus > 1 else draw(st.sampled_from(["torch", "vllm"]))},
        "modelGiB": draw(st.sampled_from([0.1, 8, 405])),
        "autoscaling": autoscaling({"specdec_verifier_num_requests_running": draw(few)}),
    }
    certificates = {
        "mode": tls,
        "requireClientCertificates": draw(flag),
        "secrets": dict.fromkeys(PORTS, "mine"),
        "issuer": {"name": "ca"},
    }
    return merged(
        SMALL | SOURCES | {"modelVolume": draw(st.sampled_from(VOLUMES))},
        {
            "verifiers": {"a": verifiers, "another-one-with-a-long-name": verifiers | {"path": "/models/target"}},
            "drafts": {"b": pod() | {"gpus": min(gpus, 1), "autoscaling": autoscaling()}},
            "orchestrator": pod() | {"autoscaling": autoscaling()},
            "openai": pod() | {"enabled": has_openai, "https": draw(flag), "autoscaling": autoscaling()},
            "networkPolicy": {"enabled": draw(flag)},
            "tls": {"mode": tls} if tls == "none" else certificates,
            "tenants": {"existingSecret": draw(st.sampled_from(["", "tenants"]))},
            "podMonitor": {"enabled": draw(flag)},
            "prometheusAddress": "http://prometheus:9090",
        },
    )


def holds_together(things: list[Object]) -> None:
    """Assert the invariants of rendered objects for any values."""
    names_are_short_and_each_is_given_once(things)
    services_select_the_pods_of_their_pool(things)
    pods_have_the_time_that_they_need(things)
    pods_have_no_rights(things)
    probes_ask_what_is_there(things)
    options_are_accepted(things)
    nothing_secret_is_in_a_configmap(things)
    what_is_mounted_is_there(things)


def names_are_short_and_each_is_given_once(things: list[Object]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in things]
    assert len(set(names)) == len(names)
    for kind, name in names:
        # Controllers append hashes to the names of Deployments and Jobs.
        assert len(name) <= (40 if kind in ("Deployment", "Job") else 63), name
        assert kind != "Service" or re.fullmatch("[a-z][a-z0-9-]*", name)
    for each in things:
        for value in each["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?)?", value), value


def services_select_the_pods_of_their_pool(things: list[Object]) -> None:
    """Selectors use only labels that never change: name, instance, component and pool."""
    allowed = {f"app.kubernetes.io/{each}" for each in ("name", "instance", "component")} | {"specdec/pool"}
    pods = templates(things)
    for name, each in of_kind(things, "Service").items():
        assert each["spec"]["selector"].keys() <= allowed
        selected = [key for key, pod in pods.items() if selects({"matchLabels": each["spec"]["selector"]}, labels(pod))]
        (only,) = selected
        # The orchestrators' common Service has a different name.
        assert only == name or role(pods[only]) == "orchestrator"
        (port,) = each["spec"]["ports"]
        assert port["port"] == PORTS[role(pods[only])]
        assert port["targetPort"] in [one["name"] for one in container(pods[only])["ports"]]
    for name, each in of_kind(things, "Deployment").items():
        assert each["spec"]["selector"]["matchLabels"].keys() <= allowed
        selected = [key for key, pod in pods.items() if selects(each["spec"]["selector"], labels(pod))]
        assert selected == [name]


def pods_have_the_time_that_they_need(things: list[Object]) -> None:
    for pod in services(things).values():
        found, drain = container(pod), config(things, pod)["drain-seconds"]
        before = found.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        steps = [before + drain, pod["spec"]["terminationGracePeriodSeconds"]]
        for each in found["args"]:
            if each.startswith("--shutdown-timeout="):
                steps.insert(1, before + int(each.partition("=")[2]))
        assert all(later - earlier >= 10 for earlier, later in pairwise(steps)), steps


def pods_have_no_rights(things: list[Object]) -> None:
    accounts = of_kind(things, "ServiceAccount")
    assert not {each["kind"] for each in things} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    for pod in templates(things).values():
        spec = pod["spec"]
        assert accounts[spec["serviceAccountName"]]["automountServiceAccountToken"] is False
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def probes_ask_what_is_there(things: list[Object]) -> None:
    for pod in services(things).values():
        found, options, of_role = container(pod), config(things, pod), role(pod)
        named = {each["name"]: each["containerPort"] for each in found["ports"]}
        assert named["main"] == options["port"] == PORTS[of_role]
        assert named["metrics"] == options["metrics-port"]
        lives = found["livenessProbe"]
        assert lives["periodSeconds"] * lives["failureThreshold"] >= 60  # an event loop may be busy for a while
        ready, start = found["readinessProbe"], found["startupProbe"]
        if of_role == "openai":
            secure = "tls-cert" in options
            assert ready["httpGet"] == {"path": "/health", "port": "main", "scheme": "HTTPS" if secure else "HTTP"}
            assert "tls-client-ca" not in options  # the kubelet presents no certificate
            assert lives["httpGet"] == {"path": "/metrics", "port": "metrics"}
        else:
            assert lives["grpc"] == {"port": options["health-port"], "service": LIVE}
            assert ready["grpc"] == {"port": options["health-port"], "service": SERVICES[of_role]}
        # Orchestrators become ready with the first verifier; a missing verifier must not cause restarts.
        waits = of_role in ("orchestrator", "openai")
        assert start.get("tcpSocket" if waits else "grpc") == ({"port": "main"} if waits else ready["grpc"])


def options_are_accepted(things: list[Object]) -> None:
    for name, pod in services(things).items():
        options = config(things, pod)
        known = {each.replace("_", "-") for each in inspect.signature(COMMANDS[role(pod)]).parameters}
        assert options.keys() <= known, f"{name}: {options.keys() - known}"


def nothing_secret_is_in_a_configmap(things: list[Object]) -> None:
    """The chart takes no secrets but only names of Secrets, and creates no Secret."""
    assert not of_kind(things, "Secret")
    for each in of_kind(things, "ConfigMap").values():
        assert not re.search("(?i)private key|api[-_]key|password", json.dumps(each["data"]))


def what_is_mounted_is_there(things: list[Object]) -> None:
    maps = of_kind(things, "ConfigMap")
    for pod in templates(things).values():
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", ())}
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            places = [mount["mountPath"] for mount in each["volumeMounts"]]
            assert len(set(places)) == len(places)
            assert all(mount["name"] in volumes and "subPath" not in mount for mount in each["volumeMounts"])
        assert all(each["configMap"]["name"] in maps for each in volumes.values() if "configMap" in each)


class TestNotes:
    @pytest.mark.parametrize("values", [SMALL, EVERYTHING], ids=["small", "everything"])
    def test_they_say_how_to_ask(self, values: Object) -> None:
        notes = text(values)["specdec/templates/NOTES.txt"]
        assert "specdec serves tiny" in notes
        assert f"--namespace {NAMESPACE} port-forward service/specdec-orchestrator 50050" in notes
        assert ("v1/models" in notes) is (values is EVERYTHING)


def test_versions_agree() -> None:
    chart_yaml = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]
    assert chart_yaml["version"] == chart_yaml["appVersion"] == project["version"]
    assert chart_yaml["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_the_page_names_all_values() -> None:
    """Each top-level key of values.yaml is in the tables of docs/helm.md."""
    page = (CHART.parents[2] / "docs" / "helm.md").read_text()
    assert [key for key in chart().values if f"`{key}" not in page] == []


def test_values_that_the_chart_comes_with_are_as_its_schema_has_them() -> None:
    """Except `models`, which the user chooses."""
    with pytest.raises(helm_python.HelmError, match="models: is empty"):
        render({})
