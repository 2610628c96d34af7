"""Values with which tests render the chart, from the fewest to everything, and the services that they start."""

from __future__ import annotations

from collections.abc import Callable

from draft_service.__main__ import main as draft
from orchestrator.__main__ import main as orchestrator
from specdec import ports
from specdec.openai_api.__main__ import main as openai
from tests.deploy.chart import EXAMPLES, SMALL, SOURCES, Object, at, merged, values_of
from verifier_service.__main__ import main as verifier

COMMANDS: dict[str, Callable[..., None]] = {
    "verifier": verifier,
    "draft": draft,
    "orchestrator": orchestrator,
    "openai": openai,
}

PORTS = {"verifier": ports.VERIFIER, "draft": ports.DRAFT, "orchestrator": ports.ORCHESTRATOR, "openai": ports.OPENAI}
ROUTE = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["llm.example.com"]}
EVERYTHING = merged(
    SMALL,
    {
        "models": {
            "tiny": {
                "revisions": {
                    "1": {"share": 95, "chatTemplate": "/models/tools.jinja"},
                    "2": {"path": "/models/other", "verifiers": ["large"], "drafts": ["b"], "share": 5},
                }
            }
        },
        "verifiers": {
            "a": {"gpus": 1, "options": {"kv-tokens": 4_000_000, "exact": False}},
            "large": {
                "path": "/models/other",
                "gpus": 8,
                "options": {"engine": "vllm"},
                "autoscaling": {"type": "hpa"},
                "modelGiB": 400,
            },
        },
        "drafts": {"b": {"gpus": 1, "autoscaling": {"type": "keda"}}},
        "orchestrator": {
            "autoscaling": {"type": "hpa"},
            "grpcRoute": ROUTE,
            "options": {"trust-drafts": True, "patience-ms": 20.5},
        },
        "openai": {
            "enabled": True,
            "autoscaling": {"type": "keda"},
            "ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example.com"], "tlsSecret": "llm"},
            "httpRoute": ROUTE,
            "options": {"allow-origin": ["https://chat.example.com"]},
        },
        "exportJobs": {"small": {"model": "/models/small", "out": "/models/small-onnx", "modelGiB": 2}},
        "tls": {"mode": "certManager", "issuer": {"name": "ca"}, "requireClientCertificates": True},
        "tenants": {"existingSecret": "tenants"},
        "test": {"apiKeySecret": {"name": "key"}},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
        "prometheusAddress": "http://prometheus.monitoring.svc:9090",
    },
)
"""Values that enable everything in the chart."""

HARDLY_ANYTHING: Object = {
    "models": {"tiny": {"revisions": {"1": {"path": "/opt/model", "verifiers": ["a"]}}}},
    "verifiers": {"a": {"path": "/opt/model", "resources": {"limits": {"memory": "8Gi"}}}},
    "networkPolicy": {"enabled": False},
    "defaults": {
        "image": {"registry": "registry.example.com"},
        "pdb": {"enabled": False},
        "topologySpreadConstraints": [],
        "preStopSeconds": 0,
    },
    "verifierDefaults": {"cache": {"enabled": False}, "shmSize": ""},
    "tenants": {"existingSecret": "tenants"},
}

VOLUMES: tuple[Object, ...] = (
    {"persistentVolumeClaim": {"claimName": "models"}},
    {"image": {"reference": "example.org/models:1", "pullPolicy": "IfNotPresent"}},
    {
        "download": {
            "image": "example.org/fetch:1",
            "command": ["fetch"],
            "args": ["--to", "/models"],
            "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
            "sizeLimit": "20Gi",
        }
    },
)

COMBINATIONS: dict[str, Object] = {
    "the least": SMALL,
    "everything": EVERYTHING,
    "hardly anything": HARDLY_ANYTHING,
    **{f"models in {next(iter(each))}": SMALL | SOURCES | {"modelVolume": each} for each in VOLUMES},
    "a volume for one pool": merged(SMALL, at("drafts/b/modelVolume", VOLUMES[1])),
    "a volume for the orchestrator": merged(SMALL, SOURCES, at("orchestrator/modelVolume", VOLUMES[2])),
    "your certificates": merged(
        SMALL,
        at("tls", {"mode": "secrets", "secrets": {"verifier": "v", "draft": "d", "orchestrator": "o", "openai": "f"}}),
        at("openai/enabled", True),
    ),
    "http behind a gateway": merged(EVERYTHING, at("openai/https", False)),
    "keda for all": merged(
        EVERYTHING,
        *(at(f"{each}/autoscaling/type", "keda") for each in ("verifiers/a", "verifiers/large", "drafts/b")),
        at("orchestrator/autoscaling", {"type": "keda", "targets": {"specdec_orchestrator_num_requests_running": 50}}),
    ),
    "a claim for the cache": merged(SMALL, at("verifierDefaults/cache/persistentVolumeClaim", "specdec-cache")),
    "images by digest": merged(SMALL, at("defaults/image/digest", "sha256:" + "0" * 64)),
    "one's own placement": merged(
        SMALL,
        at(
            "verifiers/a",
            {
                "nodeSelector": {"kind": "cpu"},
                "tolerations": [{"key": "cpu", "operator": "Exists"}],
                "affinity": {"podAntiAffinity": {}},
                "priorityClassName": "high",
                "runtimeClassName": "runc",
                "podLabels": {"team": "a", "app.kubernetes.io/name": "not this"},
                "podAnnotations": {"note": "b"},
                "env": [{"name": "OMP_WAIT_POLICY", "value": "passive"}],
                "strategy": {"type": "Recreate"},
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "zone",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": {"matchLabels": {"a": "b"}},
                    },
                    {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"},
                ],
            },
        ),
    ),
    "a load balancer": merged(
        SMALL,
        at("orchestrator/service", {"type": "LoadBalancer", "annotations": {"internal": "true"}}),
        at("networkPolicy/clients", [{"ipBlock": {"cidr": "10.0.0.0/8"}}]),
    ),
    "pull secrets": merged(SMALL, at("defaults/imagePullSecrets", [{"name": "registry"}])),
    "accounts of a cloud": merged(SMALL, at("serviceAccountAnnotations", {"example.org/role": "reader"})),
    "no callers": merged(SMALL, at("networkPolicy", {"clients": [], "monitoring": []})),
    "callers of other namespaces": merged(
        SMALL,
        at("openai/enabled", True),
        at("networkPolicy/openaiClients", [{"ipBlock": {"cidr": "10.0.0.0/8"}}]),
        at("networkPolicy/clients", [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]),
    ),
    "names that are no words in YAML": {
        "models": {
            "on": {
                "revisions": {
                    "2026": {"path": "/models/a", "verifiers": ["true"]},
                    "2026-10-01": {"path": "/models/b", "verifiers": ["null"], "share": 0.5},
                    "1e3": {"path": "/models/b", "verifiers": ["null"], "share": 0},
                }
            },
            "org/model: 7B #1": {"revisions": {"0x1F": {"path": "/models/a", "verifiers": ["true"]}}},
        },
        "verifiers": {"true": {"path": "/models/a", "modelGiB": 1}, "null": {"path": "/models/b", "modelGiB": 1}},
        "defaults": {"image": {"registry": "registry.example.com"}},
    },
    "part of another chart": SMALL | {"global": {"anything": {"goes": "here"}}},
}

EXAMPLE_VALUES = {path.stem: values_of(path) for path in EXAMPLES}
WHOLE = {"the least": SMALL, "everything": EVERYTHING, **EXAMPLE_VALUES}
