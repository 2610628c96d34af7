"""The Helm chart's objects for Prometheus and Grafana."""

from __future__ import annotations

import json
import re

import yaml

from tests.deploy.chart import (
    ALONE,
    NAMESPACE,
    RELEASE,
    at,
    container,
    labels,
    merged,
    of_kind,
    render,
    selects,
    services,
)
from tests.deploy.chart_values import EVERYTHING, PORTS
from tests.deploy.expressions import DASHBOARD, RULES, alerts
from tests.metrics import families, of_http


class TestWhatIsWatched:
    def test_alerts_and_dashboard_arrive_as_they_are(self) -> None:
        things = render(EVERYTHING)
        (found,) = of_kind(things, "PrometheusRule").values()
        absent = "absent(specdec_orchestrator_serving{})"
        ours = absent.format('{job="specdec/serving/specdec/orchestrator"}')
        assert found["spec"] == yaml.safe_load(RULES.read_text().replace(absent.format(""), ours))
        dashboard = of_kind(things, "ConfigMap")["specdec-dashboard"]
        assert json.loads(dashboard["data"]["specdec.json"]) == json.loads(DASHBOARD.read_text())
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"

    def test_no_metric_has_a_label_that_its_target_has(self) -> None:
        """Prometheus would rename it to exported_..., and panels would group by the label of the scraped pod."""
        (monitor,) = of_kind(render(EVERYTHING), "PodMonitor").values()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        of_target = {"namespace", "pod", "container", "endpoint", "job", "instance"}
        of_target |= {rule["targetLabel"] for rule in endpoint["relabelings"]}
        for each in (*families(), *of_http()):
            assert not of_target.intersection(getattr(each, "_labelnames", ())), each.name

    def test_drafts_alone_are_told_of_no_orchestrator(self) -> None:
        values = merged(ALONE, at("prometheusRule", {"enabled": True}))
        (found,) = of_kind(render(values), "PrometheusRule").values()
        (rule,) = [
            each for group in found["spec"]["groups"] for each in group["rules"] if each["alert"] == "SpecdecNotServing"
        ]
        assert rule["expr"] == "(sum by (job) (specdec_orchestrator_serving)) == 0"

    def test_runbooks_have_an_address(self) -> None:
        values = merged(EVERYTHING, at("prometheusRule/runbooks", "https://git.example.com/specdec/"))
        (found,) = of_kind(render(values), "PrometheusRule").values()
        links = {rule["annotations"]["runbook_url"] for group in found["spec"]["groups"] for rule in group["rules"]}
        assert links == {f"https://git.example.com/specdec/docs/runbooks/{each.name}.md" for each in alerts()}

    def test_jobs_are_those_that_alerts_take(self) -> None:
        """The test relabels as Prometheus does, with Prometheus' default expression `(.*)`."""
        things = render(EVERYTHING)
        (found,) = of_kind(things, "PodMonitor").values()
        (endpoint,) = found["spec"]["podMetricsEndpoints"]
        wanted = {name for each in alerts() for name in re.findall(r'job=~"([^"]+)"', each.expression)}
        jobs = set()
        for name, pod in services(things).items():
            assert selects(found["spec"]["selector"], labels(pod))
            assert endpoint["port"] in [each["name"] for each in container(pod)["ports"]]
            seen = {"__meta_kubernetes_pod_name": name} | {
                "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", key): value for key, value in labels(pod).items()
            }
            told: dict[str, str] = {}
            for rule in endpoint["relabelings"]:
                value = ";".join(seen.get(each, "") for each in rule["sourceLabels"])
                told[rule["targetLabel"]] = rule.get("replacement", "$1").replace("$1", value)
            assert all(re.fullmatch(each, told["job"]) for each in wanted)
            assert told["instance"] == name
            assert told["pool"] == labels(pod).get("specdec/pool", "")
            jobs.add(told["job"])
        assert jobs == {f"specdec/{NAMESPACE}/{RELEASE}/{each}" for each in PORTS}
