"""The Helm chart for tests: rendered by Helm's own engine, with objects validated against strict schemas."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

import helm_python
import yaml
from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry, Resource

from tests.deploy.expressions import DEPLOY

Object = dict[str, Any]
"""A Kubernetes object, or values of the chart."""

CHART = DEPLOY / "helm" / "specdec"
EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
SCHEMAS = Path(__file__).parent / "schemas"
"""Schemas of custom resources, covering the fields that the chart uses."""

VERSIONS = ("1.31", "1.34", "1.37")
"""Kubernetes versions for validation: the lowest in Chart.yaml, and later ones."""

RELEASE, NAMESPACE = "specdec", "serving"

SMALL: Object = {
    "models": {"tiny": {"revisions": {"1": {"path": "/models/target", "verifiers": ["a"], "drafts": ["b"]}}}},
    "verifiers": {"a": {"model": "tiny", "revision": "1", "modelGiB": 8}},
    "drafts": {"b": {"path": "/models/draft", "modelGiB": 0.5}},
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
    "defaults": {"image": {"registry": "registry.example.com"}},
}
"""Minimal values that a user gives."""

ALONE: Object = {
    "drafts": {"b": {"path": "/models/draft", "modelGiB": 0.5}},
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
    "networkPolicy": {"draftClients": [{"podSelector": {}}]},
    "defaults": {"image": {"registry": "registry.example.com"}},
}
"""Values for drafts alone, which serve an ordinary vLLM."""


SOURCES: Object = {"networkPolicy": {"modelSources": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]}]}}
"""Egress targets of pods that download models."""


def values_of(example: Path) -> Object:
    """Return the values in a file."""
    values: Object = yaml.safe_load(example.read_text())
    return values


def merged(*layers: Mapping[str, Any]) -> Object:
    """Merge values as Helm merges several files; later layers win."""
    found: Object = {}
    for layer in layers:
        for key, value in layer.items():
            below = found.get(key)
            both = isinstance(value, dict) and isinstance(below, dict)
            found[key] = merged(below, value) if both and isinstance(below, dict) else deepcopy(value)
    return found


def at(path: str, value: object) -> Object:
    """Return nested values with `value` at a path, its keys separated by `/`."""
    for key in reversed(path.split("/")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render(values: Object, name: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """Return all objects of a release, including tests; raise HelmError if the values are refused."""
    return list(objects(text(values, name, namespace)))


def text(values: Object, name: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """Return the rendered text of each template."""
    return _text(json.dumps(values), name, namespace)


@functools.lru_cache(maxsize=64)
def _text(values: str, name: str, namespace: str) -> dict[str, str]:
    chart().validate_schema(json.loads(values))
    return chart().render(json.loads(values), name=name, namespace=namespace)


def objects(rendered: Mapping[str, str]) -> Iterator[Object]:
    """Yield the objects in rendered templates. Duplicate keys, which could hide errors, raise."""
    for name, content in rendered.items():
        if name.endswith(".yaml"):
            yield from (each for each in yaml.load_all(content, _Strict) if each is not None)


class _Strict(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        assert len(found) == len(node.value), f"a key is given twice{node.start_mark}"
        return found


def problems(thing: Object, version: str) -> list[str]:
    """Return the schema violations of an object in a Kubernetes version. A kind without a schema is a violation."""
    place = f"{thing['kind']} {thing['metadata']['name']}"
    ours = SCHEMAS / f"{thing['kind']}.json"
    try:
        schema = _ours(ours) if ours.exists() else _kubernetes(thing["kind"], thing["apiVersion"], version)
    except FileNotFoundError:
        return [f"{place}: Kubernetes {version} has no {thing['kind']} of {thing['apiVersion']}"]
    found = [f"{place}: {error.json_path}: {error.message}" for error in schema.iter_errors(thing)]
    return found + [each for inner in within(thing) for each in problems(inner, version)]


@functools.cache
def _ours(schema: Path) -> Draft7Validator:
    return Draft7Validator(json.loads(schema.read_text()))


@functools.cache
def _kubernetes(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """Return a validator for a kind, with the schemas of the package kubernetes-validate. (The package's own function
    rereads all schemas of a version for each object.)"""
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    return Draft202012Validator(_schema(version, name), registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_schema(version, "_definitions")) @ Registry[Any]()


def _schema(version: str, name: str) -> Object:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    found: Object = json.loads((folder / f"{name}.json").read_text())
    return found


def within(thing: Object) -> Iterator[Object]:
    """Yield the built-in objects embedded in a custom resource, so that their schemas apply."""
    spec = thing.get("spec", {})
    if thing["kind"] == "ScaledObject":
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        scaled = {"scaleTargetRef": spec["scaleTargetRef"], "maxReplicas": 1, "behavior": behavior}
        metadata = {"name": thing["metadata"]["name"]}
        yield {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": metadata,
            "spec": scaled | {"scaleTargetRef": {"kind": "Deployment", "name": "any"} | spec["scaleTargetRef"]},
        }


def of_kind(things: Iterable[Object], *kinds: str) -> dict[str, Object]:
    """Return the objects of these kinds by name."""
    return {each["metadata"]["name"]: each for each in things if each["kind"] in kinds}


def templates(things: Iterable[Object]) -> dict[str, Object]:
    """Return all pod templates by the name of their owner."""
    found: dict[str, Object] = {}
    for each in things:
        name = each["metadata"]["name"]
        match each["kind"]:
            case "Deployment" | "Job":
                found[name] = each["spec"]["template"]
            case "Pod":
                found[name] = each
    return found


def labels(template: Object) -> dict[str, str]:
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def role(template: Object) -> str:
    """Return a pod's component label."""
    return labels(template)["app.kubernetes.io/component"]


def container(template: Object) -> Object:
    """Return the only container of a pod, init containers aside."""
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def services(things: Iterable[Object]) -> dict[str, Object]:
    """Return the pod templates of services."""
    return {
        name: each
        for name, each in templates(things).items()
        if role(each) in ("verifier", "draft", "orchestrator", "openai")
    }


def config(things: list[Object], template: Object) -> Object:
    """Return the options in a service's configuration file."""
    (name,) = [each["configMap"]["name"] for each in template["spec"]["volumes"] if each["name"] == "config"]
    options: Object = yaml.safe_load(of_kind(things, "ConfigMap")[name]["data"]["config.yaml"])
    return options


def models_file(things: list[Object]) -> str:
    """Return the content of the orchestrator's models file."""
    (found,) = [each["data"]["models.yaml"] for each in things if "models.yaml" in each.get("data", {})]
    assert isinstance(found, str)
    return found


def selects(selector: Mapping[str, Any], pod: Mapping[str, str]) -> bool:
    """Return whether a selector (matchLabels, matchExpressions with In and NotIn) matches these labels."""
    wanted = selector.get("matchLabels", {})
    if any(pod.get(key) != value for key, value in wanted.items()):
        return False
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] in ("In", "NotIn")
        if (pod.get(each["key"]) in each["values"]) is not (each["operator"] == "In"):
            return False
    return True


def documented_metrics() -> dict[str, str]:
    """Return the metrics in docs/metrics.md with their types."""
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^\| `(specdec_\w+)` \| (\w+) \|", page, re.MULTILINE))
