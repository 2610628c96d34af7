"""Values that the Helm chart refuses, with its error messages."""

from __future__ import annotations

import helm_python
import pytest

from tests.deploy.chart import ALONE, SMALL, Object, at, merged, of_kind, render
from tests.deploy.chart_values import ROUTE

WRONG: dict[str, tuple[Object, str]] = {
    "no model": ({"models": {}}, "models: is empty"),
    "a pool that is not there": (
        at("models/tiny/revisions/1/verifiers", ["c"]),
        "models.tiny.revisions.1.verifiers: there is no pool verifiers.c",
    ),
    "a draft that is not there": (
        at("models/tiny/revisions/1/drafts", ["a"]),
        "models.tiny.revisions.1.drafts: there is no pool drafts.a",
    ),
    "a pool of two directories": (
        at("models/tiny/revisions/2", {"path": "/models/other", "verifiers": ["a"]}),
        "models.tiny.revisions.2.verifiers: pool a serves",
    ),
    "a pool of another revision": (
        merged(
            at("models/tiny/revisions/2", {"path": "/models/target", "verifiers": ["a"]}),
        ),
        "pool a serves models.tiny.revisions.1",
    ),
    "callers from outside whom nobody lets in": (
        at("orchestrator/service/type", "NodePort"),
        "orchestrator.service.type: is NodePort, and networkPolicy.clients lets nobody in from outside",
    ),
    "callers from outside, where other namespaces are let in": (
        merged(
            at("orchestrator/service/type", "LoadBalancer"),
            at("networkPolicy/clients", [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]),
        ),
        "networkPolicy.clients lets nobody in from outside: add an ipBlock",
    ),
    "no registry": (at("defaults/image/registry", ""), "drafts.b.image.registry: is empty"),
    "a quantity that Kubernetes does not know": (at("verifierDefaults/cache/sizeLimit", "1K"), "sizeLimit"),
    "another one": (at("verifierDefaults/shmSize", "1.2.3"), "shmSize"),
    "no size of a model": (at("verifiers/c", {"path": "/m"}), "verifiers.c.modelGiB: is missing"),
    "no size of a draft": (at("drafts/c", {"path": "/m"}), "drafts.c.modelGiB: is missing"),
    "a size of nothing": (at("drafts/b/modelGiB", 0), "modelGiB"),
    "versions on a volume that keeps no record": (
        at(
            "drafts/b",
            {
                "learnKeySecret": {"name": "k"},
                "options": {"learn-tokens": 9, "versions": "/models/v"},
                "modelVolume": {"image": {"reference": "example.org/models:1"}},
            },
        ),
        "drafts.b.options.versions: needs a persistentVolumeClaim",
    ),
    "an export without a size": (
        at("exportJobs/x", {"model": "/a", "out": "/b"}),
        "exportJobs.x.modelGiB: is missing",
    ),
    "an export in 5 bits": (
        at("exportJobs/x", {"model": "/a", "out": "/b", "modelGiB": 1, "bits": 5}),
        "/exportJobs/x/bits",
    ),
    "a download of any size": (
        at("drafts/b/modelVolume", {"download": {"image": "a"}}),
        "drafts.b.modelVolume.download.sizeLimit: is missing",
    ),
    "a download from nowhere": (
        at("drafts/b/modelVolume", {"download": {"image": "a", "sizeLimit": "1Gi"}}),
        "networkPolicy.modelSources: is empty, and drafts.b downloads its model",
    ),
    "no limit of /tmp": (at("defaults/tmpSize", ""), "tmpSize"),
    "nobody to ask for names": (at("networkPolicy/dns", []), "/networkPolicy/dns"),
    "no share": (at("models/tiny/revisions/1/share", 0), "models.tiny.revisions: all have a share of 0"),
    "a share below none": (at("models/tiny/revisions/1/share", -1), "share"),
    "a pool twice": (at("models/tiny/revisions/1/verifiers", ["a", "a"]), "/models/tiny/revisions/1/verifiers"),
    "no pool": (at("models/tiny/revisions/1/verifiers", []), "/models/tiny/revisions/1/verifiers"),
    "a name with @": (at("models/a@b", {"revisions": {"1": {"path": "/m", "verifiers": ["a"]}}}), "a@b"),
    "a revision with a blank": (at("models/tiny/revisions/a b", {"path": "/m", "verifiers": ["a"]}), "a b"),
    "a relative path": (at("models/tiny/revisions/1/path", "models/target"), "path"),
    "a revision that is not there": (at("verifiers/a/revision", "2"), "pool a serves models.tiny.revisions.2"),
    "a model that is not there": (
        at("verifiers/c", {"model": "none", "revision": "1"}),
        "verifiers.c: there is no models.none.revisions.1",
    ),
    "path and model": (at("verifiers/a/path", "/models/x"), "verifiers.a: has path and model"),
    "neither path nor model": (at("verifiers/c", {"replicas": 2}), "verifiers.c: should have model and revision"),
    "no revision": (at("verifiers/c", {"model": "tiny"}), "verifiers.c.revision: is missing"),
    "a draft without a path": (at("drafts/c", {"replicas": 2}), "drafts.c.path: is missing"),
    "a draft on two GPUs": (at("drafts/b/gpus", 2), "drafts.b.gpus: is 2, and a draft runs on one"),
    "several GPUs without vLLM": (
        at("verifiers/a/gpus", 4),
        "verifiers.a.gpus: is 4, and a target on several GPUs is for options.engine vllm",
    ),
    "a target on two nodes": (at("verifiers/a", {"gpus": 8, "nodes": 2}), "nodes"),
    "GPUs that vLLM leaves alone": (
        at("verifiers/a", {"gpus": 4, "options": {"engine": "vllm", "vllm-options": '{"tensor_parallel_size": 2}'}}),
        "verifiers.a.options.vllm-options: tensor_parallel_size is 2, and verifiers.a.gpus is 4",
    ),
    "a compiled model without vLLM": (
        at("verifiers/a/options", {"compile": True}),
        "verifiers.a.options.compile: is true, and is for options.engine vllm",
    ),
    "no options of vLLM's": (
        at("verifiers/a", {"gpus": 4, "options": {"engine": "vllm", "vllm-options": "{quantization: fp8}"}}),
        "verifiers.a.options.vllm-options: is no JSON object",
    ),
    "a GGUF file of a revision": (
        at("models/tiny/revisions/1/path", "/models/target.gguf"),
        "models.tiny.revisions.1.path: is a GGUF file, should be a directory made from it by `specdec import-gguf`",
    ),
    "a GGUF file of a pool": (
        at("verifiers/c", {"path": "/m.gguf", "modelGiB": 1}),
        "verifiers.c.path: is a GGUF file",
    ),
    "a GGUF file of a draft": (at("drafts/b/path", "/models/draft.GGUF"), "drafts.b.path: is a GGUF file"),
    "a GGUF file to export": (
        at("exportJobs/x", {"model": "/a.gguf", "out": "/b", "modelGiB": 1}),
        "exportJobs.x.model: is a GGUF file",
    ),
    "texts to learn from without a key": (
        at("drafts/b/options", {"learn-tokens": 1000}),
        "drafts.b.learnKeySecret.name: is missing, and options.learn-tokens is 1000",
    ),
    "a key to learn that no pod has": (at("drafts/b/options", {"learn-key-file": "/key"}), "learn-key-file"),
    "a collector by HTTP": (
        at("verifiers/a/options", {"otlp-endpoint": "http://collector:4318"}),
        "verifiers.a.options.otlp-endpoint: is http://collector:4318, should be HOST:PORT",
    ),
    "GPUs that are not used": (
        at("verifiers/a", {"gpus": 1, "options": {"device": "cpu"}}),
        "verifiers.a.options.device: is cpu",
    ),
    "fewer at most than at least": (
        at("drafts/b/autoscaling", {"type": "hpa", "minReplicas": 5}),
        "drafts.b.autoscaling.minReplicas: is 5, and maxReplicas is 4",
    ),
    "nothing to scale by": (
        at("drafts/b/autoscaling", {"type": "hpa", "targets": {}}),
        "drafts.b.autoscaling.targets: is empty",
    ),
    "a metric of another role": (
        at("drafts/b/autoscaling/targets", {"specdec_verifier_num_sessions": 1}),
        "specdec_verifier_num_sessions",
    ),
    "a metric that is none": (
        at("verifiers/a/autoscaling/targets", {"specdec_verifier_waiting": 1}),
        "specdec_verifier_waiting",
    ),
    "a part of nothing": (
        at("orchestrator", {"resources": {"requests": {"cpu": None}}, "autoscaling": {"type": "hpa"}}),
        "orchestrator.autoscaling.targets.cpu: is a part of resources.requests.cpu",
    ),
    "keda without Prometheus": (at("orchestrator/autoscaling/type", "keda"), "prometheusAddress is empty"),
    "two volumes": (
        at("modelVolume/image", {"reference": "a"}),
        "modelVolume: has image and persistentVolumeClaim",
    ),
    "two volumes of a pool": (
        at("drafts/b/modelVolume", {"image": {"reference": "a"}, "download": {"image": "b"}}),
        "drafts.b.modelVolume: has download and image",
    ),
    "an export into nowhere": (
        at("exportJobs/x", {"model": "/a", "out": "/b", "modelVolume": {"image": {"reference": "a"}}}),
        "exportJobs.x: writes into a volume",
    ),
    "a Secret that is not named": (
        at("tls", {"mode": "secrets", "secrets": {"verifier": "a", "draft": "b"}}),
        "tls.secrets.orchestrator: is empty",
    ),
    "no issuer": (at("tls/mode", "certManager"), "tls.issuer.name: is empty"),
    "an issuer without TLS": (
        at("tls/issuer/name", "ca"),
        "tls.issuer.name: is set, and tls.mode is none",
    ),
    "a secret without TLS": (at("tls/secrets/draft", "d"), "tls.secrets.draft: is set, and tls.mode is none"),
    "certificates of clients without TLS": (
        at("tls/requireClientCertificates", True),
        "tls.requireClientCertificates: is set, and tls.mode is none",
    ),
    "a mode that is none": (at("tls/mode", "cert-manager"), "/tls/mode"),
    "a way to nothing": (at("openai/httpRoute", ROUTE), "openai.httpRoute: leads to openai"),
    "an Ingress without hosts": (
        at("openai", {"enabled": True, "ingress": {"enabled": True}}),
        "openai.ingress.hosts: is empty",
    ),
    "a way from nowhere": (
        at("orchestrator/grpcRoute/enabled", True),
        "orchestrator.grpcRoute.parentRefs: is empty",
    ),
    "a misspelt value": (at("verifier", {}), "verifier"),
    "a misspelt value of a pool": (at("verifiers/a/gpu", 1), "gpu"),
    "a misspelt option": (at("verifiers/a/options", {"kv-token": 1}), "kv-token"),
    "an option of another service": (at("drafts/b/options", {"step-rows": 1}), "step-rows"),
    "an option that the chart sets": (at("verifiers/a/options", {"port": 1}), "port"),
    "text for a number": (at("verifiers/a/gpus", "1"), "/verifiers/a/gpus"),
    "a pool's name in capitals": (at("verifiers/A", {"path": "/models/target"}), "A"),
    "a tag that is a number": (at("defaults/image/tag", 1.1), "/defaults/image/tag"),
    "a digest that is none": (at("defaults/image/digest", "latest"), "/defaults/image/digest"),
}

WRONG_ALONE: dict[str, tuple[Object, str]] = {
    "nobody may call them": (at("networkPolicy/draftClients", []), "networkPolicy.draftClients: is empty"),
    "a front without models": (at("openai/enabled", True), "openai.enabled: is true, and models is empty"),
    "a way to no orchestrator": (
        at("orchestrator/grpcRoute", {"enabled": True, "parentRefs": [{"name": "gateway"}]}),
        "orchestrator.grpcRoute: leads to orchestrators, and without models there are none",
    ),
    "certificates for nobody": (
        at("tls", {"mode": "certManager", "issuer": {"name": "ca"}}),
        "tls.draftClientNames: is empty",
    ),
}


class TestWhatIsRefused:
    @pytest.mark.parametrize(("values", "says"), WRONG.values(), ids=WRONG.keys())
    def test_in_words_that_name_it(self, values: Object, says: str) -> None:
        with pytest.raises(helm_python.HelmError) as refused:
            render(SMALL | values if values == {"models": {}} else merged(SMALL, values))
        assert says in str(refused.value)

    @pytest.mark.parametrize(("values", "says"), WRONG_ALONE.values(), ids=WRONG_ALONE.keys())
    def test_where_drafts_are_alone(self, values: Object, says: str) -> None:
        render(ALONE)
        with pytest.raises(helm_python.HelmError) as refused:
            render(merged(ALONE, values))
        assert says in str(refused.value)

    def test_a_release_that_begins_with_a_digit(self) -> None:
        with pytest.raises(helm_python.HelmError, match="fullnameOverride: 1st must be a letter, then"):
            render(SMALL, "1st")
        with pytest.raises(helm_python.HelmError, match=r"fullnameOverride: my\.rel must be a letter, then"):
            render(SMALL, "my.rel")
        names = of_kind(render(SMALL | {"fullnameOverride": "first"}, "1st"), "Service")
        assert set(names) == {"first-verifier-a", "first-draft-b", "first-orchestrator", "first-orchestrator-pods"}
