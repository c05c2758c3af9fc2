"""docs/guides/on-kubernetes.md against the chart: names, Secrets and certificates of its commands are what it needs."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from cryptography import x509
from tests.integration.docs.blocks import ALL, commands
from tests.support.charts import NAMESPACE, SERVICES, defaults, render
from tests.unit.deploy.test_network import covers, dialled
from tests.unit.docs.pages import ROOT

from penstock.cli.commands.credentials import make
from penstock_chassis.healthcheck import CA_VARIABLE
from tools.helm import CHART

PAGE: Final = "docs/guides/on-kubernetes.md"


def lines(program: str) -> Iterator[list[str]]:
    """The words of each command of the page that begins with this program."""
    for block in ALL:
        if block.page == PAGE and block.kind == "sh":
            for command in commands(block):
                words = shlex.split(command.line)
                if words[0] == program:
                    yield words


@pytest.mark.requirement("R9")
def test_certificates_of_the_guides_command_have_every_name_that_is_dialled(tmp_path: Path) -> None:
    """By services, by the probe, by clients, and by `penstock drain`."""
    (words,) = [found for found in lines("penstock") if found[1] == "credentials"]
    hosts = [words[at + 1] for at, word in enumerate(words) if word == "--host"]
    make(tmp_path / "credentials", hosts, 1)
    for service, names in dialled(render({})).items():
        certificate = x509.load_pem_x509_certificate((tmp_path / "credentials" / f"{service}.pem").read_bytes())
        certified = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        known = certified.value.get_values_for_type(x509.DNSName)
        assert all(any(covers(pattern, name) for pattern in known) for name in names), service
    assert f'"penstock.{NAMESPACE}.svc:7702"' in (tmp_path / "credentials" / "connection.json").read_text("utf-8")
    made = {path.name for path in (tmp_path / "credentials").iterdir()}
    for found in lines("kubectl"):
        files = [word.split("credentials/")[1] for word in found if word.startswith("--from-file=")]
        assert set(files) <= made, found


@pytest.mark.requirement("R9")
def test_the_guide_names_sandbox_services_of_another_namespace() -> None:
    """What is added to its command, and to the connection file, is what that namespace's services are called by."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    (namespace,) = re.findall(r"sandbox\.namespace: ([\w-]+)", text)
    (address,) = re.findall(r'"sandbox":"([^":]+):7701"', text)
    hosts = re.findall(r"--host '?([^'\s]+)", text)
    names = dialled(render({"sandbox": {"namespace": namespace}}))["sandbox"]
    assert address in names
    assert all(any(covers(host, name) for host in hosts) for name in names - {"localhost"})


def test_secrets_of_the_guide_are_those_that_pods_mount() -> None:
    """Each with the keys that its pod reads."""
    given: dict[str, set[str]] = {}
    for words in lines("kubectl"):
        if words[3:6] == ["create", "secret", "generic"]:
            keys = [word.removeprefix("--from-file=") for word in words if word.startswith("--from-file=")]
            given[words[6]] = {key.partition("=")[0].removeprefix("credentials/") for key in keys}
    for service, pod in render({}).pods().items():
        (volume,) = [one["projected"] for one in pod["volumes"] if one["name"] == "credentials"]
        for source in volume["sources"]:
            assert {item["key"] for item in source["secret"]["items"]} <= given[source["secret"]["name"]], service
    assert set(given) == {*(f"penstock-{service}" for service in SERVICES), "penstock-connection"}


def test_the_guides_trainer_is_a_client_that_policies_let_in() -> None:
    """By its label; its connection is the Secret's."""
    (block,) = [one for one in ALL if one.page == PAGE and one.kind == "yaml kubernetes"]
    pod = yaml.safe_load(block.text)
    (peer,) = defaults()["networkPolicy"]["clients"]
    assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    secret = pod["spec"]["volumes"][0]["secret"]
    assert secret["secretName"] == "penstock-connection"
    assert secret["defaultMode"] & 0o077 == 0, "clients refuse a file that others may read, and the volume is read-only"


def test_the_guides_pool_is_the_one_that_sandboxes_want() -> None:
    """The label and the taint of its commands."""
    pool = defaults()["sandbox"]
    label, taint = (next(words for words in lines("kubectl") if words[1] == verb)[-1] for verb in ("label", "taint"))
    assert dict([label.split("=")]) == pool["nodeSelector"]
    (toleration,) = pool["tolerations"]
    assert taint == f"{toleration['key']}={toleration['value']}:{toleration['effect']}"


def test_the_guides_members_are_those_of_the_chart() -> None:
    """The table of what runs where."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    pods = render({}).pods()
    told = str([pods[service]["containers"][0]["env"] for service in ("driver", "interception")])
    members = re.findall(r"`(dns:penstock-[^`]+)`", text)
    assert len(members) == 4 and all(member in told for member in members)
    assert CA_VARIABLE in told


def test_each_command_of_the_guides_upgrade_restarts_one_kind(tmp_path: Path) -> None:
    """With the chart of the next version, whose pods differ by nothing but the images that a command names."""
    newer = tmp_path / CHART.name
    shutil.copytree(CHART, newer)
    about = (newer / "Chart.yaml").read_text(encoding="utf-8")
    (newer / "Chart.yaml").write_text(re.sub(r"0\.1\.0", "0.2.0", about), encoding="utf-8")
    upgrades = [found for found in lines("helm") if found[1] == "upgrade" and "--reuse-values" in found]
    given: list[str] = []
    before = render({}).pod_templates()
    for words, service in zip(upgrades, ("sandbox", "inference", "interception", "driver"), strict=True):
        given += [part for at, word in enumerate(words) if word == "--set" for part in words[at : at + 2]]
        after = render({}, *given, chart=newer).pod_templates()
        assert [name for name in after if after[name] != before[name]] == [service]
        assert after[service]["spec"]["containers"][0]["image"] == f"penstock/{service}:0.2.0"
        before = after
