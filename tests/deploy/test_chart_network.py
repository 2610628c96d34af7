"""Network access between pods of a release, and their certificates."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import yaml

from tests.deploy.chart import (
    NAMESPACE,
    SMALL,
    Object,
    at,
    config,
    labels,
    merged,
    models_file,
    of_kind,
    render,
    role,
    selects,
    services,
    templates,
)
from tests.deploy.chart_values import COMBINATIONS, EVERYTHING

ANYWHERE: Object = {"ipBlock": {"cidr": "203.0.113.7/32"}}
DNS: Object = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}


class TestNetwork:
    """The methods evaluate NetworkPolicy rules."""

    def reaches(self, things: list[Object], caller: Mapping[str, str], namespace: str, name: str, port: int) -> bool:
        """Return whether pods with these labels, in a namespace, may connect to a port of a pod."""
        target, isolated = labels(templates(things)[name]), False
        for each in of_kind(things, "NetworkPolicy").values():
            if not selects(each["spec"]["podSelector"], target) or "Ingress" not in each["spec"]["policyTypes"]:
                continue
            isolated = True
            for rule in each["spec"].get("ingress", ()):
                peers, open_ports = rule.get("from"), [one["port"] for one in rule.get("ports", ())]
                if open_ports and port not in open_ports:
                    continue
                if peers is None or any(self._is(peer, caller, namespace) for peer in peers):
                    return True
        return not isolated

    def _is(self, peer: Object, caller: Mapping[str, str], namespace: str) -> bool:
        if "namespaceSelector" in peer:
            there = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
        else:
            there = namespace == NAMESPACE
        return there and "ipBlock" not in peer and selects(peer.get("podSelector", {}), caller)

    @pytest.mark.parametrize(
        ("caller", "callee", "port", "may"),
        [
            ("specdec-orchestrator", "specdec-verifier-a", 50051, True),
            ("specdec-orchestrator", "specdec-draft-b", 50052, True),
            ("specdec-openai", "specdec-orchestrator", 50050, True),
            ("specdec-openai", "specdec-verifier-a", 50051, False),
            ("specdec-draft-b", "specdec-verifier-a", 50051, False),
            ("specdec-draft-b", "specdec-orchestrator", 50050, False),
            ("specdec-verifier-a", "specdec-draft-b", 50052, False),
            ("specdec-test", "specdec-orchestrator", 50050, True),
            ("specdec-verifier-a", "specdec-verifier-large", 29500, False),
            ("specdec-orchestrator", "specdec-verifier-large", 50051, True),
            ("specdec-orchestrator", "specdec-verifier-large", 29500, False),
            ("specdec-orchestrator", "specdec-verifier-a", 9090, False),
        ],
    )
    def test_within_the_release(self, caller: str, callee: str, port: int, may: bool) -> None:
        things = render(EVERYTHING)
        assert self.reaches(things, labels(templates(things)[caller]), NAMESPACE, callee, port) is may

    def leaves(self, things: list[Object], name: str, peer: Object, port: int, protocol: str = "TCP") -> bool:
        """Return whether a pod may call a peer: pods of its own namespace (by labels), a namespace or an address, in
        the form of a NetworkPolicy rule."""
        caller, isolated = labels(templates(things)[name]), False
        for each in of_kind(things, "NetworkPolicy").values():
            if not selects(each["spec"]["podSelector"], caller) or "Egress" not in each["spec"]["policyTypes"]:
                continue
            isolated = True
            for rule in each["spec"].get("egress", ()):
                ports = [(one["port"], one.get("protocol", "TCP")) for one in rule.get("ports", ())]
                if ports and (port, protocol) not in ports:
                    continue
                if "to" not in rule or any(self._may_be(one, peer) for one in rule["to"]):
                    return True
        return not isolated

    def _may_be(self, allowed: Object, peer: Object) -> bool:
        if "labels" in peer:
            return "podSelector" in allowed and selects(allowed["podSelector"], peer["labels"])
        return allowed == peer

    @pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS.keys())
    def test_pods_call_nobody_but_whom_they_must(self, values: Object) -> None:
        things = render(values)
        if not values.get("networkPolicy", {}).get("enabled", True):
            return
        for name in templates(things):
            assert all(self.leaves(things, name, DNS, 53, protocol) for protocol in ("TCP", "UDP")), name
            for port in (53, 80, 443, 6443, 4317, 8080):
                assert not self.leaves(things, name, ANYWHERE, port), (name, port)
                assert not self.leaves(things, name, {"labels": {"app": "other"}}, port), (name, port)
            assert not self.leaves(things, name, {"ipBlock": {"cidr": "169.254.169.254/32"}}, 80)

    @pytest.mark.parametrize(
        ("caller", "callee", "port", "may"),
        [
            ("specdec-orchestrator", "specdec-verifier-a", 50051, True),
            ("specdec-orchestrator", "specdec-verifier-large", 50051, True),
            ("specdec-orchestrator", "specdec-draft-b", 50052, True),
            ("specdec-orchestrator", "specdec-verifier-a", 9090, False),
            ("specdec-openai", "specdec-orchestrator", 50050, True),
            ("specdec-openai", "specdec-verifier-a", 50051, False),
            ("specdec-test", "specdec-orchestrator", 50050, True),
            ("specdec-verifier-a", "specdec-orchestrator", 50050, False),
            ("specdec-verifier-a", "specdec-draft-b", 50052, False),
            ("specdec-draft-b", "specdec-verifier-a", 50051, False),
            ("specdec-verifier-large", "specdec-verifier-a", 50051, False),
        ],
    )
    def test_within_the_release_pods_call_their_peers(self, caller: str, callee: str, port: int, may: bool) -> None:
        things = render(EVERYTHING)
        assert self.leaves(things, caller, {"labels": labels(templates(things)[callee])}, port) is may

    @pytest.mark.parametrize(
        ("endpoint", "port"),
        [
            ("collector.observability:4318", 4318),
            ("dns:///collector.observability:4317", 4317),
            ("[2001:db8::1]:4319", 4319),
        ],
    )
    def test_a_collector_is_called_where_there_is_one(self, endpoint: str, port: int) -> None:
        """Only pods with an option for the collector may call it."""
        collector = {"podSelector": {"matchLabels": {"app": "collector"}}}
        named = at("verifiers/a/options/otlp-endpoint", endpoint)
        for peers, anywhere in (([], True), ([collector], False)):
            things = render(merged(EVERYTHING, named, at("networkPolicy/collectors", peers)))
            assert self.leaves(things, "specdec-verifier-a", {"labels": {"app": "collector"}}, port)
            assert self.leaves(things, "specdec-verifier-a", ANYWHERE, port) is anywhere
            assert not self.leaves(things, "specdec-verifier-a", ANYWHERE, port + 1)
            assert not self.leaves(things, "specdec-draft-b", ANYWHERE, port)
            assert not self.leaves(things, "specdec-verifier-a", ANYWHERE, 80)

    def test_a_collector_on_a_socket_needs_no_port(self) -> None:
        named = at("verifiers/a/options/otlp-endpoint", "unix:/run/otel/socket")
        assert "specdec-verifier-egress" not in of_kind(render(merged(SMALL, named)), "NetworkPolicy")

    def test_a_download_calls_what_values_name(self) -> None:
        source = {"ipBlock": {"cidr": "10.2.0.0/16"}}
        rule = {"ports": [{"port": 443, "protocol": "TCP"}], "to": [source]}
        volume = {"download": {"image": "example.org/fetch:1", "sizeLimit": "20Gi"}}
        values = merged(EVERYTHING, at("drafts/b/modelVolume", volume), at("networkPolicy/modelSources", [rule]))
        things = render(values)
        assert self.leaves(things, "specdec-draft-b", source, 443)
        assert not self.leaves(things, "specdec-draft-b", source, 80)
        assert not self.leaves(things, "specdec-verifier-a", source, 443)

    def test_more_may_be_let_out(self) -> None:
        rule = {"to": [ANYWHERE]}
        things = render(merged(SMALL, at("networkPolicy/egress", [rule])))
        assert self.leaves(things, "specdec-verifier-a", ANYWHERE, 443)

    def test_drafts_serve_vllm_beside_orchestrators_by_their_certificates(self) -> None:
        tls = {"mode": "certManager", "issuer": {"name": "ca"}, "draftClientNames": ["vllm.serving.svc"]}
        things = render(merged(SMALL, at("tls", tls), at("networkPolicy/draftClients", [{"podSelector": {}}])))
        orchestrators = f"specdec-orchestrator.{NAMESPACE}.svc.cluster.local"
        for pod, names in (
            ("specdec-draft-b", [orchestrators, "vllm.serving.svc"]),
            ("specdec-verifier-a", [orchestrators]),
        ):
            assert config(things, templates(things)[pod])["tls-client-name"] == names

    @pytest.mark.parametrize(
        ("name", "field"), [("orchestrators.example.com", "dnsNames"), ("spiffe://example.com/orchestrator", "uris")]
    )
    def test_a_name_that_pods_want_to_see_is_in_the_certificate(self, name: str, field: str) -> None:
        tls = {"mode": "certManager", "issuer": {"name": "ca"}, "clientName": name}
        things = render(merged(SMALL, at("tls", tls)))
        assert config(things, templates(things)["specdec-verifier-a"])["tls-client-name"] == [name]
        certificates = of_kind(things, "Certificate")
        # cert-manager's own default is a third of the duration: 720h would contradict shorter durations.
        assert not any("renewBefore" in certificate["spec"] for certificate in certificates.values())
        assert name in certificates["specdec-orchestrator"]["spec"][field]
        assert name not in certificates["specdec-verifier"]["spec"].get(field, [])

    def test_a_service_passes_on_how_it_is_reached_from_outside(self) -> None:
        told = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
        callers = at("networkPolicy/clients", [{"ipBlock": {"cidr": "10.0.0.0/8"}}])
        things = render(merged(SMALL, callers, at("orchestrator/service", told)))
        spec = of_kind(things, "Service")["specdec-orchestrator"]["spec"]
        assert {name: spec.get(name) for name in told} == told

    def test_vllm_may_call_drafts_where_values_say_so(self) -> None:
        vllm = {"app": "vllm"}
        values = at("networkPolicy/draftClients", [{"podSelector": {"matchLabels": vllm}}])
        for things, may in ((render(SMALL), False), (render(merged(SMALL, values)), True)):
            assert self.reaches(things, vllm, NAMESPACE, "specdec-draft-b", 50052) is may
            assert not self.reaches(things, vllm, NAMESPACE, "specdec-verifier-a", 50051)

    @pytest.mark.parametrize(
        ("namespace", "callee", "port", "may"),
        [
            (NAMESPACE, "specdec-orchestrator", 50050, True),
            (NAMESPACE, "specdec-verifier-a", 50051, False),
            ("elsewhere", "specdec-orchestrator", 50050, False),
            ("elsewhere", "specdec-openai", 8000, True),
            ("elsewhere", "specdec-verifier-a", 9090, False),
            ("monitoring", "specdec-verifier-a", 9090, True),
            ("monitoring", "specdec-verifier-a", 50051, False),
        ],
    )
    def test_from_others(self, namespace: str, callee: str, port: int, may: bool) -> None:
        reached = self.reaches(render(EVERYTHING), {"app": "other"}, namespace, callee, port)
        assert reached is may

    def test_nobody_else_may_be_let_in(self) -> None:
        things = render(merged(EVERYTHING, at("networkPolicy", {"clients": [], "monitoring": []})))
        for caller, port, may in (({"app": "other"}, 50050, False), ({"app": "other"}, 9090, False)):
            assert self.reaches(things, caller, NAMESPACE, "specdec-orchestrator", port) is may
        assert self.reaches(
            things, labels(templates(things)["specdec-openai"]), NAMESPACE, "specdec-orchestrator", 50050
        )

    def test_a_pod_of_an_other_release_is_another(self) -> None:
        things, other = render(EVERYTHING), templates(render(EVERYTHING, "other"))["other-orchestrator"]
        assert not self.reaches(things, labels(other), NAMESPACE, "specdec-verifier-a", 50051)


class TestTls:
    def test_certificates_are_for_the_names_by_which_pods_are_found(self) -> None:
        things = render(EVERYTHING)
        names = {each: set(one["spec"]["dnsNames"]) for each, one in of_kind(things, "Certificate").items()}
        for revision in yaml.safe_load(models_file(things))["models"]["tiny"]["revisions"].values():
            for of_role, addresses in (("verifier", revision["verifiers"]), ("draft", revision["drafts"])):
                hosts = {each.removeprefix("dns:///").partition(":")[0] for each in addresses}
                assert hosts <= names[f"specdec-{of_role}"]
        (found,) = config(things, templates(things)["specdec-openai"])["orchestrator"]
        assert found.removeprefix("dns:///").partition(":")[0] in names["specdec-orchestrator"]

    def test_verifiers_and_drafts_know_the_orchestrator_by_name(self) -> None:
        things = render(EVERYTHING)
        ours = set(of_kind(things, "Certificate")["specdec-orchestrator"]["spec"]["dnsNames"])
        for name, pod in services(things).items():
            if role(pod) in ("verifier", "draft"):
                assert set(config(things, pod)["tls-client-name"]) <= ours, name

    @pytest.mark.parametrize("name", ["everything", "your certificates"])
    def test_each_pod_has_the_secret_of_its_role(self, name: str) -> None:
        values = COMBINATIONS[name]
        things = render(values)
        for pod in services(things).values():
            (secret,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
            yours = values["tls"].get("secrets", {}).get(role(pod))
            assert secret == {"secretName": yours or f"specdec-{role(pod)}-tls", "defaultMode": 0o440}
            for option, value in config(things, pod).items():
                if "tls" in option and not option.endswith("name"):
                    assert value in {f"/etc/specdec/tls/{each}" for each in ("tls.crt", "tls.key", "ca.crt")}

    def test_without_it_nothing_speaks_of_it(self) -> None:
        things = render(SMALL)
        assert not of_kind(things, "Certificate")
        assert not any("tls" in option for pod in services(things).values() for option in config(things, pod))
