"""`helm` and `kubectl` of a cluster that is a directory: `python commands.py helm|kubectl ARGUMENTS`.

Only the command lines that a stack on Kubernetes uses are known; any other ends with exit code 1, as does what a
cluster would refuse. The chart is rendered by Helm itself. Pods are ready from the third look on, if the Secrets that
they mount are there. A forwarded port runs the pod's service itself, with the environment and the Secret of the pod:
what a kubelet, a volume and cluster DNS would give it stands in `served`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml
from tests.support.endpoints.loopback import unused_port

from tools import helm

HOME: Final = "PENSTOCK_TEST_CLUSTER"
"""Environment variable with the cluster's directory."""
MODEL: Final = "PENSTOCK_TEST_CLUSTER_MODEL"
"""Environment variable with the directory that the model's claim stands for."""
INSTANCE: Final = "app.kubernetes.io/instance"
_KINDS: Final = {
    "statefulsets": "StatefulSet",
    "daemonsets": "DaemonSet",
    "pods": "Pod",
    "roles": "Role",
    "secrets": "Secret",
    "persistentvolumeclaims": "PersistentVolumeClaim",
}
_LOOKS: Final = 3

Object = dict[str, Any]


class Cluster:
    """The directory: `objects.json`; `looks`, how often pods were asked for; what the services have.

    `failing.json` has for a verb (get, uninstall) how many further commands fail, as where the API server is away.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "objects.json"
        self.objects: list[Object] = json.loads(file.read_text("utf-8")) if file.exists() else []

    def is_away(self, verb: str) -> bool:
        """Whether a command of this verb fails; one fewer fails after it."""
        file = self.folder / "failing.json"
        counts: dict[str, int] = json.loads(file.read_text("utf-8")) if file.exists() else {}
        left = counts.get(verb, 0)
        if left:
            file.write_text(json.dumps({**counts, verb: left - 1}), "utf-8")
        return left > 0

    def keep(self) -> None:
        """Writes the objects."""
        new = self.folder / f"objects.{os.getpid()}"  # others read meanwhile, and a command may be ended at any time
        new.write_text(json.dumps(self.objects), "utf-8")
        new.replace(self.folder / "objects.json")

    def find(self, kind: str, name: str, namespace: str) -> Object | None:
        """Returns an object."""
        return next((one for one in self.objects if _key(one) == (kind, name, namespace)), None)

    def add(self, one: Object) -> None:
        """Adds an object; one of that name is refused."""
        if self.find(*_key(one)) is not None:
            fail(f'Error from server (AlreadyExists): {one["kind"]} "{one["metadata"]["name"]}" already exists')
        self.objects.append(one)

    def labelled(self, kinds: str, namespace: str, selector: str) -> list[Object]:
        """Returns the objects of some kinds with a label."""
        labels = dict(part.split("=") for part in selector.split(","))
        wanted = {_KINDS[kind] for kind in kinds.split(",")}
        return [
            one
            for one in self.objects
            if one["kind"] in wanted
            and one["metadata"]["namespace"] == namespace
            and labels.items() <= one["metadata"].get("labels", {}).items()
        ]


def fail(text: str) -> NoReturn:
    """Ends as the programs do."""
    sys.stderr.write(f"{text}\n")
    sys.exit(1)


def _key(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return one["kind"], one["metadata"]["name"], one["metadata"]["namespace"]


def _install(cluster: Cluster, name: str, chart: str, namespace: str) -> None:
    if any(one["metadata"].get("labels", {}).get(INSTANCE) == name for one in cluster.objects if one["kind"] == "Pod"):
        fail("Error: INSTALLATION FAILED: cannot re-use a name that is still in use")
    command = [str(helm.program("helm")), "template", name, chart, "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=sys.stdin.read(), capture_output=True, text=True, check=False)
    if done.returncode:
        fail(done.stderr)
    for one in yaml.safe_load_all(done.stdout):
        one["metadata"].setdefault("namespace", namespace)
        cluster.add(one)
        if one["kind"] == "StatefulSet":
            template = one["spec"]["template"]
            for number in range(one["spec"]["replicas"]):
                pod = f"{one['metadata']['name']}-{number}"
                own = {"namespace": one["metadata"]["namespace"], "labels": template["metadata"]["labels"]}
                cluster.add({"kind": "Pod", "metadata": {"name": pod, **own}, "spec": template["spec"]})
                for claim in one["spec"].get("volumeClaimTemplates", []):
                    title = f"{claim['metadata']['name']}-{pod}"
                    cluster.add({"kind": "PersistentVolumeClaim", "metadata": {"name": title, **own}})
    for service in ("driver", "interception", "sandbox", "inference"):
        _members(cluster, service).write_text("{}", "utf-8")


def _mounted(cluster: Cluster, pod: Mapping[str, Any]) -> Path | None:
    """Writes what a pod mounts of Secrets, as its kubelet does; None where one of them is missing."""
    namespace = pod["metadata"]["namespace"]
    place: Path = cluster.folder / "mounts" / pod["metadata"]["name"]
    place.mkdir(parents=True, exist_ok=True)
    for volume in pod["spec"]["volumes"]:
        for source in volume.get("projected", {}).get("sources", []):
            secret = cluster.find("Secret", source["secret"]["name"], namespace)
            for item in source["secret"]["items"]:
                if secret is None or item["key"] not in secret["stringData"]:
                    return None
                (place / item["path"]).write_text(secret["stringData"][item["key"]], "utf-8")
    return place


def _get(cluster: Cluster, kinds: str, namespace: str, selector: str) -> Mapping[str, Any]:
    looks = int((cluster.folder / "looks").read_text() or 0) + 1 if (cluster.folder / "looks").exists() else 1
    (cluster.folder / "looks").write_text(str(looks))
    broken = cluster.folder / "broken.json"
    found = cluster.labelled(kinds, namespace, selector)
    for one in found:
        if one["kind"] == "Pod":
            one["status"] = json.loads(broken.read_text("utf-8")) if broken.exists() else {}
        elif one["kind"] == "StatefulSet":
            pods = cluster.labelled("pods", namespace, selector)
            mine = [pod for pod in pods if pod["metadata"]["name"].startswith(f"{one['metadata']['name']}-")]
            ready = sum(_mounted(cluster, pod) is not None for pod in mine)
            one["status"] = {"readyReplicas": ready} if looks >= _LOOKS and not broken.exists() else {}
    return {"apiVersion": "v1", "kind": "List", "items": found}


def _members(cluster: Cluster, service: str) -> Path:
    return cluster.folder / f"{service}-members.json"


def served(cluster: Cluster, pod: Mapping[str, Any], service: str, port: str, mounted: Path) -> dict[str, str]:
    """The environment of a pod's service, as it is on this machine."""
    name, prefix = pod["metadata"]["name"], f"PENSTOCK_{service.upper()}"
    told: dict[str, str] = {}
    container = next(one for one in pod["spec"]["containers"] if one["name"] == service)
    for item in container["env"]:
        value = name if "valueFrom" in item else item["value"]
        value = value.replace("/run/penstock/", f"{mounted}/")  # the mount
        if item["name"].endswith("_MEMBERS"):  # cluster DNS
            kind = re.fullmatch(r"dns:[a-z0-9-]+-([a-z]+)\.[a-z0-9-]+\.svc:\d+", value)
            value = (
                f"file:{_members(cluster, kind[1])}" if kind else fail(f"{item['name']} is no member's name: {value}")
            )
        told[item["name"]] = value
    told |= {f"{prefix}_HOST": "127.0.0.1", f"{prefix}_PORT": port, f"{prefix}_METRICS_HOST": "127.0.0.1"}
    told |= {f"{prefix}_METRICS_PORT": "0", f"{prefix}_STATE_DIR": str(cluster.folder / "state" / name)}
    if service == "interception":
        told |= {f"{prefix}_INGRESS_HOST": "127.0.0.1", f"{prefix}_INGRESS_PORT": "0"}
        told[f"{prefix}_INGRESS_ADDRESS"] = "tls:127.0.0.1:0"
    elif service == "sandbox":
        told[f"{prefix}_ALLOWED_UPSTREAMS"] = '["tls:127.0.0.1:*"]'
    elif service == "inference":
        told[f"{prefix}_MODEL_DIR"] = told[f"{prefix}_MODEL_DIR"].replace("/model", os.environ[MODEL])
    return told


def _forward(cluster: Cluster, namespace: str, name: str, local: str, remote: int) -> int:
    found = cluster.find("Service", name, namespace) or fail(
        f'Error from server (NotFound): services "{name}" not found'
    )
    if remote not in {one["port"] for one in found["spec"]["ports"]}:
        fail(f"error: Service {name} does not have a service port {remote}")
    wanted = found["spec"]["selector"].items()
    pods = [one for one in cluster.objects if one["kind"] == "Pod" and wanted <= one["metadata"]["labels"].items()]
    mounted = _mounted(cluster, pods[0])
    if mounted is None:
        fail("error: unable to forward port because pod is not running. Current status=Pending")
    service = pods[0]["metadata"]["labels"]["app.kubernetes.io/component"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    environment = kept | served(cluster, pods[0], service, local or str(unused_port()), mounted)
    command = [sys.executable, "-m", f"penstock_{service}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.terminate())
        for line in process.stdout or ():
            told = json.loads(line)
            if told.get("event") == "ready":
                address = told["address"]
                _members(cluster, service).write_text(json.dumps({pods[0]["metadata"]["name"]: address}), "utf-8")
                (cluster.folder / f"{service}.pid").write_text(str(os.getpid()))
                sys.stdout.write(f"Forwarding from {address} -> {remote}\n")
                sys.stdout.flush()
        return process.wait()


def main(program: str, words: list[str]) -> int:
    """Runs one command; returns its exit code."""
    cluster = Cluster(Path(os.environ[HOME]))
    with (cluster.folder / "arguments").open("a", encoding="utf-8") as log:
        log.write(f"{program} {' '.join(words)}\n")
    values = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("--")}
    form = [word.partition("=")[0] if word.startswith("--") else word for word in words]
    namespace, selector = values.get("--namespace", ""), values.get("--selector", "")
    if cluster.is_away(next(word for word in words if not word.startswith("--"))):
        fail("Error: etcdserver: leader changed")
    match [program, *form]:
        case ["helm", "install", name, chart, "--namespace", "--values"] if values["--values"] == "-":
            _install(cluster, name, chart, namespace)
        case ["helm", "uninstall", name, "--namespace"]:
            if (cluster.folder / "stuck").exists():
                fail("Error: failed to delete release: the server is away")
            before = len(cluster.objects)
            of_it = f"{INSTANCE}={name},app.kubernetes.io/component=sandbox"
            kinds = [one["kind"] for one in cluster.labelled("pods,roles", namespace, of_it)]
            if {"Pod", "Role"} <= set(kinds):
                (cluster.folder / "orphans").touch()  # pods lose the right to delete what they have made
            kept = ("Secret", "PersistentVolumeClaim")
            cluster.objects = [
                one
                for one in cluster.objects
                if one["kind"] in kept or one["metadata"].get("labels", {}).get(INSTANCE) != name
            ]
            if len(cluster.objects) == before:
                fail(f"Error: uninstall: Release not loaded: {name}: release: not found")
        case ["kubectl", "--request-timeout", "create", "--filename"] if values["--filename"] == "-":
            for one in json.load(sys.stdin)["items"]:
                cluster.add(one)
        case ["kubectl", "--request-timeout", "get", kinds, "--namespace", "--selector", "--output"]:
            sys.stdout.write(json.dumps(_get(cluster, kinds, namespace, selector)))
        case ["kubectl", "--request-timeout", "scale", target, "--namespace", "--replicas"]:
            name = target.removeprefix("statefulset/")
            if values["--replicas"] != "0" or name == target:
                fail("error: the test's cluster scales StatefulSets to 0")
            if cluster.find("StatefulSet", name, namespace) is None:
                fail(f'Error from server (NotFound): statefulsets.apps "{name}" not found')
            cluster.objects = [
                one
                for one in cluster.objects
                if one["kind"] != "Pod" or one["metadata"]["name"].rpartition("-")[0] != name
            ]
        case ["kubectl", "--request-timeout", "delete", kinds, "--namespace", "--selector", "--wait"]:
            gone = cluster.labelled(kinds, namespace, selector)
            cluster.objects = [one for one in cluster.objects if one not in gone]
        case ["kubectl", "--request-timeout", "config", "view", "--minify", "--output"]:
            sys.stdout.write(
                json.dumps({"contexts": [{"name": "it", "context": {"cluster": "it", "namespace": "team"}}]})
            )
        case ["kubectl", "--request-timeout", "logs", "--namespace", pod, "--container", "--previous", "--tail"]:
            sys.stdout.write(f"the log of {values['--container']} in {pod}")
        case ["kubectl", "port-forward", "--address", "--namespace", target, ports]:
            local, _, remote = ports.partition(":")
            kind, _, name = target.partition("/")
            if kind != "service" or values["--address"] != "127.0.0.1":
                fail("error: the test's cluster forwards ports of Services, on loopback")
            return _forward(cluster, namespace, name, local, int(remote))
        case _:
            fail(f"error: the test's cluster does not know: {program} {' '.join(words)}")
    cluster.keep()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
