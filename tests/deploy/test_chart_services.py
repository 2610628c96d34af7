"""The Helm chart matches this version's services: their options, and the models file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
import yaml
from typer.testing import CliRunner

from orchestrator.models.file import ModelsFile
from specdec.cli.prompt_file import PromptFile
from specdec.settings import configurable
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    SMALL,
    Object,
    at,
    config,
    container,
    merged,
    models_file,
    of_kind,
    render,
    role,
    services,
    templates,
    text,
)
from tests.deploy.chart_values import COMBINATIONS, COMMANDS, EVERYTHING, WHOLE

SET_BY_THE_CHART = {
    *("config", "host", "port", "health_port", "metrics_port", "drain_seconds", "stop_with_stdin"),
    "learn_key_file",
    *("tls_cert", "tls_key", "tls_client_ca", "tls_client_name"),
    *("model", "models", "served_model_name", "chat_template", "verifier", "draft", "orchestrator", "tenants"),
    *("peer_tls_ca", "peer_tls_cert", "peer_tls_key", "peer_tls_name"),
    *("orchestrator_tls_ca", "orchestrator_tls_cert", "orchestrator_tls_key"),
    *("workers", "share_port", "sibling_socket"),  # one process per pod: replicas scale instead
}
"""Options that values may not give."""


class TestServices:
    """The chart matches this version's services."""

    @pytest.mark.parametrize("of_role", COMMANDS)
    def test_values_may_give_all_options_that_the_chart_does_not_set(self, of_role: str) -> None:
        """Add a service's new option to values.schema.json, or to SET_BY_THE_CHART."""
        schema = json.loads((CHART / "values.schema.json").read_text())
        where = schema["definitions"] if of_role in schema["definitions"] else schema["properties"]
        allowed = {each.replace("-", "_") for each in where[of_role]["properties"]["options"]["properties"]}
        assert allowed == inspect.signature(COMMANDS[of_role]).parameters.keys() - SET_BY_THE_CHART

    @pytest.mark.parametrize("values", WHOLE.values(), ids=WHOLE.keys())
    def test_a_service_takes_its_file(self, values: Object, tmp_path: Path) -> None:
        """Options, types and limits are checked by the command itself."""
        things = render(values)
        for name, pod in services(things).items():
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump(config(things, pod)))
            assert taken(role(pod), file)["drain_seconds"] == config(things, pod)["drain-seconds"]

    def test_a_file_that_is_wrong_would_be_found(self, tmp_path: Path) -> None:
        (tmp_path / "file.yaml").write_text("model: /m\nkv-tokens: 3\n")
        with pytest.raises(AssertionError, match="kv-tokens in"):
            taken("verifier", tmp_path / "file.yaml")

    def test_a_draft_that_learns_has_its_key(self) -> None:
        learns = at("drafts/b", {"options": {"learn-tokens": 1000}, "learnKeySecret": {"name": "learning"}})
        things = render(merged(SMALL, learns))
        pod = templates(things)["specdec-draft-b"]
        assert config(things, pod)["learn-key-file"] == "/etc/specdec/learn/learn.key"
        (secret,) = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
        assert secret == {"secretName": "learning", "defaultMode": 0o440}
        (mount,) = [each for each in container(pod)["volumeMounts"] if each["name"] == "learn"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/etc/specdec/learn", True)

    @pytest.mark.parametrize(
        ("openai", "stored"),
        [
            ({}, "off"),
            ({"replicas": 1}, None),
            ({"replicas": 1, "autoscaling": {"type": "hpa"}}, "off"),
            ({"options": {"response-store": "memory"}}, "memory"),
        ],
    )
    def test_responses_are_stored_only_where_each_request_finds_them(self, openai: Object, stored: str | None) -> None:
        things = render(merged(SMALL, at("openai", {"enabled": True} | openai)))
        assert config(things, templates(things)["specdec-openai"]).get("response-store") == stored

    def test_large_numbers_stay_numbers(self) -> None:
        content = text(EVERYTHING)["specdec/templates/configmaps.yaml"]
        assert "kv-tokens: 4000000\n" in content
        assert "exact: false\n" in content

    @pytest.mark.parametrize("name", COMBINATIONS)
    def test_an_orchestrator_takes_its_file_of_models(self, name: str, tmp_path: Path) -> None:
        values = COMBINATIONS[name]
        file = tmp_path / "models.yaml"
        file.write_text(models_file(render(values)))
        entries = ModelsFile(file).entries()
        revisions = {
            (model, revision): told
            for model, entry in values["models"].items()
            for revision, told in entry["revisions"].items()
        }
        assert {(each.model, each.revision) for each in entries} == revisions.keys()
        for each in entries:
            told = revisions[each.model, each.revision]
            assert (str(each.directory), each.share) == (told["path"], told.get("share", 1))
            assert str(each.chat_template or "") == told.get("chatTemplate", "")
            assert (len(each.verifiers), len(each.drafts)) == (len(told["verifiers"]), len(told.get("drafts", ())))

    def test_pods_are_found_by_the_names_of_their_services(self) -> None:
        things = render(EVERYTHING)
        told = yaml.safe_load(models_file(things))["models"]["tiny"]["revisions"]["1"]
        assert told["verifiers"] == [f"dns:///specdec-verifier-a.{NAMESPACE}.svc.cluster.local:50051"]
        assert told["drafts"] == [f"dns:///specdec-draft-b.{NAMESPACE}.svc.cluster.local:50052"]
        pools = of_kind(things, "Service")
        for name in ("specdec-verifier-a", "specdec-verifier-large", "specdec-draft-b"):
            assert pools[name]["spec"]["clusterIP"] == "None"
            assert pools[name]["spec"]["publishNotReadyAddresses"] is False

    def test_a_draft_that_tries_versions_can_record_forgotten_tenants(self) -> None:
        own = {"learnKeySecret": {"name": "k"}, "options": {"learn-tokens": 1000, "versions": "/models/v"}}
        for given, read_only in ((own, False), ({"options": {"versions": "/models/v"}}, True)):
            pod = templates(render(merged(SMALL, at("drafts/b", given))))["specdec-draft-b"]
            (mount,) = [each for each in container(pod)["volumeMounts"] if each["name"] == "models"]
            (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "models"]
            assert mount.get("readOnly", False) == read_only
            assert volume["persistentVolumeClaim"]["readOnly"] == read_only

    @pytest.mark.parametrize("values", [SMALL, EVERYTHING], ids=["the least", "everything"])
    def test_the_test_asks_each_revision_that_has_a_share(self, values: Object, tmp_path: Path) -> None:
        unasked = at("models/tiny/revisions/3", {"path": "/m", "verifiers": ["new"], "share": 0})
        things = render(merged(values, unasked, at("verifiers/new", {"path": "/m", "modelGiB": 1})))
        (tmp_path / "prompts").write_text(of_kind(things, "ConfigMap")["specdec-test"]["data"]["prompts.jsonl"])
        asked = [each.options["model"] for each in PromptFile(tmp_path / "prompts", {}).prompts()]
        shares = {name: each.get("share", 1) for name, each in values["models"]["tiny"]["revisions"].items()}
        assert asked == [f"tiny@{name}" for name in shares]

    @pytest.mark.parametrize("of_file", ["services", "vllm"])
    def test_images_are_as_the_chart_takes_them(self, of_file: str) -> None:
        images = (CHART.parents[1] / "images" / f"{of_file}.Dockerfile").read_text()
        assert "\nUSER 10001:10001\n" in images
        assert '\nENTRYPOINT ["specdec"]\n' in images

    def test_with_tenants_the_test_needs_a_key(self) -> None:
        assert "specdec-test" not in of_kind(render(merged(SMALL, at("tenants/existingSecret", "x"))), "Pod")


def taken(of_role: str, file: Path) -> Object:
    """Return the options of a service started with this file."""
    command, found = COMMANDS[of_role], Object()

    def run(**options: Any) -> None:
        found.update(options)

    run.__signature__ = inspect.signature(command)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = get_type_hints(command, include_extras=True)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(configurable(of_role, run))
    done = CliRunner().invoke(app, ["--config", str(file)])
    assert done.exit_code == 0, done.output
    return found
