"""The Helm chart's workloads: rollouts, several GPUs, autoscaling, disruptions."""

from __future__ import annotations

import json
import re

import pytest

from tests.deploy.chart import (
    ALONE,
    CHART,
    NAMESPACE,
    SMALL,
    SOURCES,
    Object,
    at,
    config,
    container,
    documented_metrics,
    labels,
    merged,
    of_kind,
    render,
    selects,
    templates,
)
from tests.deploy.chart_values import COMBINATIONS, EVERYTHING, EXAMPLE_VALUES
from tests.deploy.expressions import metrics


class TestPlacement:
    def test_no_pod_is_left_out_of_the_defaults(self) -> None:
        """On a cluster whose nodes are all tainted, a pod without tolerations stays pending."""
        tolerations = [{"key": "x", "operator": "Exists"}]
        placed = at("defaults", {"tolerations": tolerations, "nodeSelector": {"zone": "a"}})
        things = templates(render(merged(EVERYTHING, placed)))
        assert {"specdec-test", "specdec-export-small"} <= {re.sub("-[0-9a-f]{8}$", "", name) for name in things}
        assert all(each["spec"]["nodeSelector"]["zone"] == "a" for each in things.values())
        assert all(tolerations[0] in each["spec"]["tolerations"] for each in things.values())

    def test_an_export_needs_no_verifier_s_node(self) -> None:
        gpus = at("verifierDefaults/nodeSelector", {"gpu": "a100"})
        (job,) = of_kind(render(merged(EVERYTHING, gpus)), "Job").values()
        assert "nodeSelector" not in job["spec"]["template"]["spec"]
        own = at("exportJobs/small/nodeSelector", {"kind": "large"})
        (job,) = of_kind(render(merged(EVERYTHING, gpus, own)), "Job").values()
        assert job["spec"]["template"]["spec"]["nodeSelector"] == {"kind": "large"}

    def test_a_download_takes_what_the_service_has(self) -> None:
        """A quota refuses a pod if one of its containers does not name CPU or disk."""
        download, service = downloading({})
        assert download["requests"] == {name: service["requests"][name] for name in ("cpu", "ephemeral-storage")}
        disk = service["limits"]["ephemeral-storage"]
        assert download["limits"] == {"memory": "2Gi", "ephemeral-storage": disk}

    def test_a_download_leaves_a_pod_its_own_cores(self) -> None:
        """Kubernetes wants limits of CPU and memory on every container of the pod."""
        download, _ = downloading({"limits": {"cpu": "8"}})
        assert download["limits"]["cpu"] == download["requests"]["cpu"] == "8"
        assert download["limits"]["memory"] == "2Gi"

    def test_a_download_requests_no_more_than_the_pod(self) -> None:
        download, _ = downloading({"requests": {"cpu": "1"}, "limits": {"cpu": "8"}})
        assert (download["requests"]["cpu"], download["limits"]["cpu"]) == ("1", "8")

    def test_a_download_has_no_request_above_its_limit(self) -> None:
        own = {"requests": {"memory": "4Gi"}, "limits": {"cpu": "2"}}
        download, service = downloading({"requests": {"cpu": "8"}}, own)
        both = {"cpu": "2", "memory": "4Gi", "ephemeral-storage": service["limits"]["ephemeral-storage"]}
        assert download == {"requests": both, "limits": both}


def downloading(resources: Object, of_download: Object | None = None) -> tuple[Object, Object]:
    """Return the resources of a pod's download and of its service, which has the given ones in the values."""
    source = {"image": "example.org/fetch:1", "sizeLimit": "9Gi", "resources": of_download or {}}
    pool = at("verifiers/a", {"resources": resources})
    values = merged(SMALL | SOURCES | {"modelVolume": {"download": source}}, pool)
    spec = templates(render(values))["specdec-verifier-a"]["spec"]
    return spec["initContainers"][0]["resources"], spec["containers"][0]["resources"]


class TestRollouts:
    def test_a_share_restarts_nothing(self) -> None:
        before, after = (
            render(merged(EVERYTHING, at("models/tiny/revisions", {"1": {"share": a}, "2": {"share": b}})))
            for a, b in ((95, 5), (50, 50))
        )
        changed = [one["metadata"]["name"] for one, other in zip(before, after, strict=True) if one != other]
        assert changed == ["specdec-models"]

    def test_an_option_restarts_its_own_pool(self) -> None:
        before = templates(render(SMALL))
        after = templates(render(merged(SMALL, at("drafts/b/options", {"max-sessions": 9}))))
        assert [name for name in before if before[name] != after[name]] == ["specdec-draft-b"]

    def test_a_new_revision_touches_no_pod_that_runs(self) -> None:
        before = templates(render(SMALL))
        added = at("models/tiny/revisions/2", {"path": "/models/new", "verifiers": ["new"], "share": 0})
        after = templates(
            render(merged(SMALL, added, at("verifiers/new", {"model": "tiny", "revision": "2", "modelGiB": 8})))
        )
        assert after.keys() - before.keys() == {"specdec-verifier-new"}
        assert all(after[name] == before[name] for name in before)

    def test_an_autoscaler_is_not_overruled(self) -> None:
        for each in (*of_kind(render(EVERYTHING), "Deployment").values(),):
            scaled = each["metadata"]["name"] != "specdec-verifier-a"
            assert ("replicas" not in each["spec"]) is scaled

    def test_a_rollout_waits_for_pods_that_load(self) -> None:
        for each in of_kind(render(EVERYTHING), "Deployment").values():
            probe = container(each["spec"]["template"])["startupProbe"]
            assert each["spec"]["progressDeadlineSeconds"] > probe["failureThreshold"] * probe["periodSeconds"]

    def test_an_export_that_changes_is_another_job(self) -> None:
        """Kubernetes refuses changes to a Job, so a changed export is a new Job. An unchanged one is not repeated."""
        changes = {
            "exportJobs/small/dtype": "float16",
            "exportJobs/small/bits": 8,
            "defaults/image/tag": "another",
            "defaults/podSecurityContext/runAsUser": 1000,
            "defaults/options/log-level": "debug",
            "defaults/drainSeconds": 60,
        }
        found = [
            next(iter(of_kind(render(merged(EVERYTHING, change)), "Job").items()))
            for change in ({}, *(at(path, value) for path, value in changes.items()))
        ]
        (name, job), *others = found
        for other, another in others:
            assert (other == name) is (another["spec"] == job["spec"])
        assert [other == name for other, _ in others] == [False, False, False, False, True, True]

    def test_a_pool_that_is_recreated_says_that_it_rolls_no_more(self) -> None:
        """Without the null, server-side apply keeps the defaulted rollingUpdate, and rejects it with the new type."""
        things = render(merged(SMALL, at("verifiers/a/strategy", {"type": "Recreate"})))
        assert of_kind(things, "Deployment")["specdec-verifier-a"]["spec"]["strategy"] == {
            "type": "Recreate",
            "rollingUpdate": None,
        }

    @pytest.mark.parametrize(
        ("bits", "passed"), [({}, "auto"), ({"bits": "auto"}, "auto"), ({"bits": 4}, "4"), ({"bits": 32}, "32")]
    )
    def test_an_export_has_the_bits_of_its_values(self, bits: Object, passed: str) -> None:
        (job,) = of_kind(render(merged(EVERYTHING, at("exportJobs/small", bits))), "Job").values()
        arguments = container(job["spec"]["template"])["args"]
        assert arguments == ["export", "/models/small", "/models/small-onnx", "--dtype", "float32", "--bits", passed]

    def test_an_export_runs_as_verifiers_do(self) -> None:
        mine = {"imagePullSecrets": [{"name": "mine"}], "podSecurityContext": {"fsGroup": 7}}
        things = render(merged(EVERYTHING, at("verifierDefaults", mine)))
        (job,) = of_kind(things, "Job").values()
        spec = job["spec"]["template"]["spec"]
        assert spec["imagePullSecrets"] == [{"name": "mine"}]
        assert spec["securityContext"]["fsGroup"] == 7


class TestImages:
    @pytest.mark.parametrize(
        ("image", "found"),
        [
            ({}, "registry.example.com/specdec-verifier:0.1.0-cuda"),
            ({"registry": "localhost:5000/a/"}, "localhost:5000/a/specdec-verifier:0.1.0-cuda"),
            ({"tag": "mine"}, "registry.example.com/specdec-verifier:mine-cuda"),
            ({"tag": "mine", "cudaSuffix": ""}, "registry.example.com/specdec-verifier:mine"),
            ({"repository": "ghcr.io/us/verifier"}, "ghcr.io/us/verifier:0.1.0-cuda"),
            ({"repository": "ghcr.io/us/verifier", "registry": ""}, "ghcr.io/us/verifier:0.1.0-cuda"),
            ({"repository": "localhost/verifier"}, "localhost/verifier:0.1.0-cuda"),
            ({"repository": "verifier.x"}, "registry.example.com/verifier.x:0.1.0-cuda"),
            ({"digest": "sha256:" + "0" * 64}, "registry.example.com/specdec-verifier@sha256:" + "0" * 64),
        ],
    )
    def test_of_a_pod_with_a_gpu(self, image: Object, found: str) -> None:
        things = render(merged(SMALL, at("verifiers/a", {"gpus": 1, "image": image})))
        assert container(templates(things)["specdec-verifier-a"])["image"] == found

    def test_one_tag_for_all(self) -> None:
        things = render(merged(EVERYTHING, at("defaults/image/tag", "2")))
        tags = {name: container(pod)["image"].rpartition(":")[2] for name, pod in templates(things).items()}
        with_gpus = {name for name, tag in tags.items() if tag == "2-cuda"}
        assert with_gpus == {each for each in tags if "verifier" in each or "draft" in each}
        assert set(tags.values()) == {"2", "2-cuda"}


GIB = 1024


def resources(values: Object, pod: str) -> Object:
    found: Object = container(templates(render(values))[pod])["resources"]
    return found


class TestResources:
    """Resource requests and limits cover a pod's use, and follow from its configuration."""

    @pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS.keys())
    def test_every_container_has_limits(self, values: Object) -> None:
        for name, pod in templates(render(values)).items():
            for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                assert each["resources"]["limits"]["memory"], (name, each["name"])
            assert container(pod)["resources"]["limits"]["ephemeral-storage"], name

    @pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS.keys())
    def test_every_folder_has_a_limit(self, values: Object) -> None:
        folders = [
            volume["emptyDir"]
            for pod in templates(render(values)).values()
            for volume in pod["spec"]["volumes"]
            if "emptyDir" in volume
        ]
        assert folders
        assert all(folder.get("sizeLimit") for folder in folders)

    @pytest.mark.parametrize(
        ("pool", "gib"), [({"modelGiB": 8}, 12 + 4 + 1), ({"modelGiB": 100, "shmSize": "16Gi"}, 150 + 4 + 16)]
    )
    def test_memory_follows_from_the_weights(self, pool: Object, gib: int) -> None:
        found = resources(merged(SMALL, at("verifiers/a", pool)), "specdec-verifier-a")
        assert found["requests"]["memory"] == found["limits"]["memory"] == f"{gib * GIB}Mi"

    def test_ones_own_limits_go_before(self) -> None:
        own = {"requests": {"cpu": "4", "memory": "20Gi"}, "limits": {"memory": "24Gi"}}
        found = resources(merged(SMALL, at("verifiers/a/resources", own)), "specdec-verifier-a")
        assert (found["requests"]["memory"], found["limits"]["memory"], found["requests"]["cpu"]) == (
            "20Gi",
            "24Gi",
            "4",
        )

    @pytest.mark.parametrize("part", ["requests", "limits"])
    @pytest.mark.parametrize(("name", "amount"), [("memory", "40Gi"), ("ephemeral-storage", "1Gi")])
    def test_a_request_or_limit_alone_gives_the_other(self, part: str, name: str, amount: str) -> None:
        own = at(f"resources/{part}/{name}", amount)
        job = {"model": "/a", "out": "/b", "modelGiB": 3} | own
        values = merged(SMALL, at("verifiers/a", own), at("exportJobs/x", job))
        (export,) = [each for each in templates(render(values)) if "export" in each]
        for pod in ("specdec-verifier-a", export):
            found = resources(values, pod)
            assert found["requests"][name] == found["limits"][name] == amount

    @pytest.mark.parametrize(("part", "amount"), [("requests", "4Gi"), ("limits", "512Mi")])
    def test_an_orchestrators_own_memory_gives_both(self, part: str, amount: str) -> None:
        own = at(f"orchestrator/resources/{part}/memory", amount)
        found = resources(merged(SMALL, own), "specdec-orchestrator")
        assert found["requests"]["memory"] == found["limits"]["memory"] == amount
        assert found["requests"]["cpu"] == "1"

    @pytest.mark.parametrize(
        ("own", "requested"),
        [({}, "2"), ({"requests": {"cpu": "500m"}}, "500m"), ({"limits": {"cpu": "1"}}, "1")],
    )
    def test_a_verifier_has_cores(self, own: Object, requested: str) -> None:
        """Its request is no more than its limit, and equals a limit alone: the pod then keeps whole cores."""
        found = resources(merged(SMALL, at("verifiers/a/resources", own)), "specdec-verifier-a")
        assert found["requests"]["cpu"] == requested
        assert found["limits"].get("cpu") == own.get("limits", {}).get("cpu")

    def test_disk_follows_from_the_folders(self) -> None:
        download = {"image": "example.org/fetch:1", "sizeLimit": "200Gi"}
        values = merged(SMALL, SOURCES, at("defaults/tmpSize", "500M"))
        values["modelVolume"] = {"download": download}
        cache, logs, tmp = GIB, GIB, 477
        for pod in ("specdec-verifier-a", "specdec-draft-b"):
            found = resources(values, pod)
            expected = f"{200 * GIB + cache + logs + tmp}Mi"
            assert found["requests"]["ephemeral-storage"] == found["limits"]["ephemeral-storage"] == expected
        own = at("verifiers/a/resources", {"requests": {"ephemeral-storage": "1Gi"}})
        assert resources(merged(values, own), "specdec-verifier-a")["requests"]["ephemeral-storage"] == "1Gi"
        claim = at("verifierDefaults/cache/persistentVolumeClaim", "cache")
        found = resources(merged(SMALL, claim), "specdec-verifier-a")
        assert found["limits"]["ephemeral-storage"] == f"{2 * GIB}Mi"


def test_a_pod_with_a_gpu() -> None:
    things = render(EVERYTHING)
    pod = templates(things)["specdec-verifier-a"]
    found = container(pod)
    assert "command" not in found
    assert found["args"] == ["verifier", "--config", "/etc/specdec/config/config.yaml"]
    assert found["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert found["image"] == "registry.example.com/specdec-verifier:0.1.0-cuda"
    assert config(things, pod)["device"] == "cuda"


class TestVllm:
    def test_it_starts_the_processes_of_several_gpus_itself(self) -> None:
        options = {"engine": "vllm", "vllm-options": '{"quantization": "fp8"}'}
        things = render(merged(SMALL, at("verifiers/a", {"gpus": 4, "options": options})))
        pod = templates(things)["specdec-verifier-a"]
        assert "command" not in container(pod)
        assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == 4
        passed = json.loads(config(things, pod)["vllm-options"])
        assert passed == {"quantization": "fp8", "tensor_parallel_size": 4}

    def test_one_gpu_needs_no_option(self) -> None:
        things = render(merged(SMALL, at("verifiers/a", {"gpus": 1, "options": {"engine": "vllm"}})))
        assert "vllm-options" not in config(things, templates(things)["specdec-verifier-a"])


class TestDraftsAlone:
    """Drafts for an ordinary vLLM, without models or an orchestrator."""

    def test_nothing_else_is_there(self) -> None:
        things = render(ALONE)
        assert set(templates(things)) == {"specdec-draft-b"}
        for kind in ("Service", "ServiceAccount", "ConfigMap"):
            assert {name.rpartition("/")[2] for name in of_kind(things, kind)} <= {"specdec-draft-b", "specdec-draft"}

    def test_a_draft_can_be_exported(self) -> None:
        jobs = at("exportJobs/small", {"model": "/models/small", "out": "/models/small-onnx", "modelGiB": 2})
        things = render(merged(ALONE, jobs))
        (job,) = of_kind(things, "Job").values()
        assert job["spec"]["template"]["spec"]["serviceAccountName"] in of_kind(things, "ServiceAccount")

    def test_certificates_are_theirs(self) -> None:
        tls = {"mode": "certManager", "issuer": {"name": "ca"}, "draftClientNames": ["vllm.serving.svc"]}
        things = render(merged(ALONE, at("tls", tls)))
        assert set(of_kind(things, "Certificate")) == {"specdec-draft"}
        assert config(things, templates(things)["specdec-draft-b"])["tls-client-name"] == ["vllm.serving.svc"]


class TestAutoscaling:
    @pytest.mark.parametrize("name", ["everything", "keda for all", *EXAMPLE_VALUES])
    def test_every_metric_is_a_gauge_of_the_page(self, name: str) -> None:
        things, documented = render((COMBINATIONS | EXAMPLE_VALUES)[name]), documented_metrics()
        named = set()
        for each in of_kind(things, "HorizontalPodAutoscaler").values():
            named |= {one["pods"]["metric"]["name"] for one in each["spec"]["metrics"] if one["type"] == "Pods"}
        for each in of_kind(things, "ScaledObject").values():
            for one in each["spec"]["triggers"]:
                named |= metrics(one["metadata"]["query"]) if one["type"] == "prometheus" else set()
        assert {documented[name] for name in named} <= {"gauge"}

    def test_all_that_values_may_name_are_gauges(self) -> None:
        schema = (CHART / "values.schema.json").read_text()
        named = set(re.findall(r'"(specdec_\w+)"', schema))
        assert len(named) > 5
        assert {documented_metrics()[name] for name in named} == {"gauge"}

    @pytest.mark.parametrize("at_key", ["verifiers/a", "verifierDefaults"])
    def test_targets_replace_the_default(self, at_key: str) -> None:
        targets = {"specdec_verifier_num_requests_running": 24}
        values = merged(SMALL, at(f"{at_key}/autoscaling", {"type": "hpa", "targets": targets}))
        (found,) = of_kind(render(values), "HorizontalPodAutoscaler").values()
        assert found["spec"]["metrics"] == [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": "specdec_verifier_num_requests_running"},
                    "target": {"type": "AverageValue", "averageValue": "24"},
                },
            }
        ]
        assert found["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600

    def test_what_is_scaled_exists(self) -> None:
        for values in (EVERYTHING, COMBINATIONS["keda for all"]):
            things = render(values)
            for each in of_kind(things, "HorizontalPodAutoscaler", "ScaledObject").values():
                target = each["spec"]["scaleTargetRef"]
                assert target["name"] in of_kind(things, target["kind"])

    @pytest.mark.parametrize(
        ("pool", "pod", "asked"),
        [
            ("specdec-verifier-a", "specdec-verifier-a-6d4cf56db6-x2x9f", True),
            ("specdec-verifier-a", "specdec-verifier-a-b-6d4cf56db6-x2x9f", False),
        ],
    )
    def test_prometheus_is_asked_about_the_pods_of_the_pool(self, pool: str, pod: str, asked: bool) -> None:
        things = render(COMBINATIONS["keda for all"])
        for trigger in of_kind(things, "ScaledObject")[pool]["spec"]["triggers"]:
            (pattern,) = re.findall(r'pod=~"([^"]+)"', trigger["metadata"]["query"])
            assert (re.fullmatch(pattern, pod) is not None) is asked
            assert f'namespace="{NAMESPACE}"' in trigger["metadata"]["query"]


class TestDisruptions:
    def test_a_budget_has_the_pods_of_one_pool(self) -> None:
        things = render(EVERYTHING)
        pods = templates(things)
        for name, each in of_kind(things, "PodDisruptionBudget").items():
            selected = {key for key, pod in pods.items() if selects(each["spec"]["selector"], labels(pod))}
            assert selected == {name}
