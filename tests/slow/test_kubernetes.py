"""The manifests and the Dockerfile are valid by Kubernetes' schemas, and everything that they name exists in kvrag."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from kvrag.cli import serve
from kvrag.cli.main import _parser
from kvrag.client.connection import KEY_VARIABLE
from kvrag.server import app, guard
from kvrag.store.shared import connect

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VARIANTS = ("bucket",)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = f"{PROJECT['name']}:{PROJECT['version']}"


def rendered(variant: str) -> list[dict[str, Any]]:
    """All documents, as kustomize collects them: nothing is patched or generated."""
    return list(_resources(DEPLOY / "kubernetes" / variant))


def _resources(folder: Path) -> Iterator[dict[str, Any]]:
    found = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(found) == {"apiVersion", "kind", "resources"}
    for name in found["resources"]:
        if (folder / name).is_dir():
            yield from _resources(folder / name)
        else:
            yield from yaml.safe_load_all((folder / name).read_text())


def pods(variant: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload's pod template, with its only container."""
    for document in rendered(variant):
        spec = document.get("spec", {})
        spec = spec.get("jobTemplate", document).get("spec", {}) if document["kind"] == "CronJob" else spec
        if "template" in spec:
            (container,) = spec["template"]["spec"]["containers"]
            yield spec["template"], container


def settings(variant: str) -> dict[str, str]:
    (found,) = (document["data"] for document in rendered(variant) if document["kind"] == "ConfigMap")
    return found


def kvrags(variant: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """The pods that run kvrag, with their arguments as kvrag parses them."""
    for template, container in pods(variant):
        if container["image"] == IMAGE:
            args = [_expanded(word, settings(variant)) for word in container["args"]]
            yield template, container, _parser(args).parse_args(args)


def _expanded(word: str, known: dict[str, str]) -> str:
    """As Kubernetes expands $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], word)


def one(variant: str, kind: str, name: str = "kvrag") -> dict[str, Any]:
    (found,) = (each for each in rendered(variant) if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


every = pytest.mark.parametrize("variant", VARIANTS)


@every
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_documents_are_valid(variant: str, version: str) -> None:
    documents = rendered(variant)
    assert len(documents) >= 6
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)


def test_a_wrong_document_is_detected() -> None:
    document = one("bucket", "Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_every_file_belongs_to_a_variant() -> None:
    used = {DEPLOY / "kubernetes" / variant / "kustomization.yaml" for variant in (*VARIANTS, "base")}
    for kustomization in list(used):
        used |= {kustomization.parent / name for name in yaml.safe_load(kustomization.read_text())["resources"]}
    assert set(DEPLOY.rglob("*.yaml")) <= used


@every
def test_commands_are_kvrags_and_agree(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRAG_API_KEY", "of-the-secret")
    commands = {args.command: args for _, _, args in kvrags(variant)}
    assert set(commands) == {"serve", "warm", "store"}
    assert len({(args.store, args.store_cache) for args in commands.values()}) == 1
    assert len({(commands[name].model, commands[name].codec) for name in ("serve", "warm")}) == 1
    connect(commands["serve"].store)  # the URL is well formed
    serve.read_settings(commands["serve"])
    assert {container["image"] for _, container in pods(variant)} == {IMAGE}


@every
def test_ports_and_probes_are_the_servers(variant: str) -> None:
    ((template, container, args),) = (each for each in kvrags(variant) if each[2].command == "serve")
    assert args.host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": args.port}]
    open_routes = {route.path for route in app.router.routes if "GET" in route.methods} & set(guard._OPEN)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in open_routes, "a probe sends no API key"
        assert asked["port"] == "http"
    assert template["spec"]["terminationGracePeriodSeconds"] > args.shutdown_timeout
    assert args.no_corpus, "one server works on a corpus"
    size = int(re.fullmatch(r"(\d+)Gi", template["spec"]["volumes"][0]["emptyDir"]["sizeLimit"])[1])
    assert args.store_bytes < size << 30
    memory = int(re.fullmatch(r"(\d+)Gi", container["resources"]["requests"]["memory"])[1])
    assert args.ram_bytes + args.conversation_bytes + args.batch_bytes < memory << 30


@every
def test_every_environment_variable_is_read(variant: str) -> None:
    documented = (ROOT / "docs" / "many-machines.md").read_text()
    for _, container, _ in kvrags(variant):
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= set(settings(variant))
        assert {source.popitem()[0] for source in container["envFrom"]} == {"configMapRef", "secretRef"}
        for name in {each["name"] for each in container.get("env", [])} | set(settings(variant)) - {
            "MODEL",
            "STORE",
            "CODEC",
        }:
            assert name == "HF_HOME" or f"`{name}`" in documented
    page = (ROOT / "docs" / "many-machines.md").read_text()
    assert set(re.findall(r"--from-literal=(\w+)=", page)) >= {KEY_VARIABLE}, "the page says how to make the secret"


@every
def test_services_and_references_lead_somewhere(variant: str) -> None:
    labels = [template["metadata"]["labels"] for template, _ in pods(variant)]
    for document in rendered(variant):
        if document["kind"] == "Service":
            selected = [each for each in labels if document["spec"]["selector"].items() <= each.items()]
            assert len(selected) == 1
            ports = [port["name"] for _, container in pods(variant) for port in container.get("ports", [])]
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= set(ports)
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    for _, container in pods(variant):
        for source in container.get("envFrom", []):
            ((kind, reference),) = source.items()
            assert reference["name"] == "kvrag"
            assert kind == "secretRef" or one(variant, "ConfigMap", "kvrag")
    scaled = one(variant, "HorizontalPodAutoscaler")["spec"]
    assert one(variant, scaled["scaleTargetRef"]["kind"], scaled["scaleTargetRef"]["name"])
    metric = scaled["metrics"][0]["pods"]["metric"]["name"]
    sources = "".join(path.read_text() for path in (ROOT / "kvrag" / "server").glob("*.py"))
    assert metric in re.findall(r"Gauge\(\"(\w+)\"", sources)


@every
def test_nothing_runs_as_root_or_writes_outside_its_volumes(variant: str) -> None:
    for template, container in pods(variant):
        spec, limits = template["spec"], container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert limits == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        assert {mount["name"] for mount in mounted.values()} == volumes
    for _, container, args in kvrags(variant):
        writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
        homes = [each["value"] for each in container.get("env", [])]
        for place in (args.store_cache, *homes):
            assert any(Path(place).is_relative_to(path) for path in writable)


# ---------------------------------------------------------------- the image


def dockerfile() -> list[list[str]]:
    """Instructions as words, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_the_user_and_the_command_of_the_manifests() -> None:
    found = {line[0]: line[1:] for line in dockerfile()}
    (user,) = found["USER"]
    assert {template["spec"]["securityContext"]["runAsUser"] for template, _, _ in kvrags("bucket")} == {int(user)}
    assert f"--uid {user}" in " ".join(found["RUN"])
    assert found["ENTRYPOINT"] == ["[kvrag]"]
    command = re.findall(r"[\w.-]+", " ".join(found["CMD"]))
    args = _parser(command).parse_args(command)
    assert (args.host, found["EXPOSE"]) == ("0.0.0.0", [str(args.port)])
    (extras,) = re.findall(r"\.\[([a-z,]+)\]", " ".join(found["RUN"]))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert IMAGE in (DEPLOY / "Dockerfile").read_text()


def test_the_image_gets_all_files_that_the_wheel_needs(tmp_path: Path) -> None:
    allowed = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [name for line in dockerfile() if line[0] == "COPY" for name in line[1:-1]]
    assert set(copied) == set(allowed)
    for name in copied:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (path,) = WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "out"), versions=["standard"])
    names = zipfile.ZipFile(path).namelist()
    assert {"kvrag/cli/main.py", "kvrag/reader/model.safetensors"} <= set(names)


@pytest.mark.skipif(not (Path(sys.executable).parent / "hadolint").exists(), reason="hadolint has no wheel here")
def test_the_dockerfile_is_linted() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
