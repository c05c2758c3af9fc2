"""What agent-sandbox's controllers, the scheduler and the kubelet do for claims; and what goes wrong on purpose.

Purpose: a claim adopts a ready sandbox of its pool, or has one made; its status says so as the real controller's does
(reasons and messages are its own words). Deletion in the foreground ends the pod first.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.agent_sandbox.store import Object, Store
from tests.support.hf_jobs import machine

CLAIM_UID = "agents.x-k8s.io/claim-uid"
POD_NAME = "agents.x-k8s.io/pod-name"
_FINALIZER = "foregroundDeletion"


@dataclass
class Pod:
    """A pod that runs, or will."""

    name: str
    pool: str
    folder: Path
    address: str
    machine: machine.Machine | None = None
    relay: asyncio.Server | None = None
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    claim: str = ""
    ready: bool = False
    phase: str = "Pending"


class Controller:
    """All pods. The attributes that are not private are faults, which tests set."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.objects: dict[tuple[str, str], Object] = {}
        """What was applied beside resources of the store: ConfigMaps and Secrets, by kind and name."""
        self.hold = False
        """Pods do not become ready."""
        self.hold_deletions = False
        """Finalizers are not taken off."""
        self.waiting: Mapping[str, str] | None = None
        """Instead of starting, containers wait for this reason, with this message."""
        self.unschedulable = ""
        """Pods are not scheduled; the scheduler's message."""
        self.quota: int | None = None
        """Most pods."""
        self.end_reason = "Error"
        """What the kubelet says of a container that has ended."""
        self.stranger = False
        """The next pod that is claimed answers at its address, and says another name."""
        self._folder = folder
        self._pods: dict[str, Pod] = {}
        self._net = secrets.randbelow(200) + 20
        self._next = secrets.randbelow(60000)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._behaviour = asyncio.Event()

    def start(self) -> None:
        """Begins to do so."""
        self._spawn(self._forever())

    def changed(self) -> None:
        """Something may have to be done."""
        self._changed.set()
        self._behaviour.set()
        self._behaviour = asyncio.Event()

    async def aclose(self) -> None:
        """Ends every pod."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(pod) for pod in list(self._pods.values())))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forever(self) -> None:
        while True:
            self._changed.clear()
            for claim in self.store.all("sandboxclaims"):
                self._reconcile(claim)
            for pool in self.store.all("sandboxwarmpools"):
                self._replenish(pool)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._changed.wait()

    # Claims ------------------------------------------------------------------------------------------------------

    def _reconcile(self, claim: Object) -> None:
        name = claim["metadata"]["name"]
        pod = next((one for one in self._pods.values() if one.claim == name), None)
        if "deletionTimestamp" in claim["metadata"]:
            if pod is not None:
                pod.claim = f"{name} (deleted)"
                self._spawn(self._end(pod))
            if not self.hold_deletions and all(one.claim != f"{name} (deleted)" for one in self._pods.values()):
                self.store.remove("sandboxclaims", name)
            return
        if _expired(claim):
            self.delete(name, foreground=True)
            return
        pool = self.store.get("sandboxwarmpools", claim["spec"]["warmPoolRef"]["name"])
        if pool is None:
            message = f'SandboxWarmPool "{claim["spec"]["warmPoolRef"]["name"]}" not found'
            self._status(name, "WarmPoolNotFound", message)
            return
        if pod is None:
            if claim.get("status", {}).get("sandbox", {}).get("name"):
                return  # its pod was taken away by a test, which says what follows
            pod = self._adopt(pool) or self._make(pool)
            if pod is None:
                message = (
                    f'Error seen: pod create failed: pods "{name}" is forbidden: exceeded quota: sandboxes, '
                    f"requested: pods=1, used: pods={self.quota}, limited: pods={self.quota}"
                )
                self._status(name, "ReconcilerError", message)
                return
            pod.claim = name
        self._show(claim, pod)

    def _adopt(self, pool: Object) -> Pod | None:
        ready = [one for one in self._pods.values() if one.pool == pool["metadata"]["name"] and not one.claim]
        return next((one for one in ready if one.ready), None)

    def _show(self, claim: Object, pod: Pod) -> None:
        name = claim["metadata"]["name"]
        if self.store.get("sandboxes", pod.name) is None:
            self.store.create("sandboxes", {"metadata": {"name": pod.name, "annotations": {POD_NAME: pod.name}}})
        if pod.phase == "Failed":
            self._status(name, "PodFailed", "Pod failed", pod, finished="PodFailed")
        elif pod.ready and not self.hold:
            self._status(name, "DependenciesReady", "Pod is Ready", pod, ready=True)
        else:
            self._status(name, "DependenciesNotReady", f"Pod exists with phase: {pod.phase}", pod)

    def _status(
        self, name: str, reason: str, message: str, pod: Pod | None = None, *, ready: bool = False, finished: str = ""
    ) -> None:
        kinds = [("Ready", "True" if ready else "False", reason, message)]
        if finished:
            kinds.append(("Finished", "True", finished, message))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [
            {"type": kind, "status": status, "reason": why, "message": text, "lastTransitionTime": now}
            for kind, status, why, text in kinds
        ]
        bound = {} if pod is None else {"name": pod.name, **({"podIPs": [pod.address]} if pod.ready else {})}
        claim = self.store.get("sandboxclaims", name)
        shown = (claim or {}).get("status", {})
        before = [(one["type"], one["status"], one["reason"], one["message"]) for one in shown.get("conditions", ())]
        if claim is not None and (before != kinds or shown.get("sandbox", {}) != bound):
            self.store.change(
                "sandboxclaims", name, lambda one: one.update(status={"conditions": conditions, "sandbox": bound})
            )

    def delete(self, name: str, *, foreground: bool) -> None:
        """Begins to delete a claim."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if foreground:
            self.store.change(
                "sandboxclaims",
                name,
                lambda one: one["metadata"].update(deletionTimestamp=now, finalizers=[_FINALIZER]),
            )
        else:
            for pod in [one for one in self._pods.values() if one.claim == name]:
                self._spawn(self._end(pod))
            self.store.remove("sandboxclaims", name)
        self.changed()

    # Pods --------------------------------------------------------------------------------------------------------

    def pods(self) -> list[Object]:
        """Every pod as the API shows it."""
        shown = []
        for pod in self._pods.values():
            claim = self.store.get("sandboxclaims", pod.claim)
            status: Object = {"phase": pod.phase, "conditions": [], "containerStatuses": []}
            if self.unschedulable and pod.machine is None:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                status["conditions"].append({**condition, "message": self.unschedulable})
            elif self.waiting is not None and pod.machine is None:
                one = {"name": "sandbox", "image": self._image(pod), "imageID": "", "ready": False, "restartCount": 0}
                status["containerStatuses"].append({**one, "state": {"waiting": dict(self.waiting)}})
            elif pod.phase == "Failed":
                one = {"name": "sandbox", "image": self._image(pod), "imageID": "", "ready": False, "restartCount": 0}
                ended = {"reason": self.end_reason, "exitCode": 137}
                status["containerStatuses"].append({**one, "state": {"terminated": ended}})
            labels = {CLAIM_UID: claim["metadata"]["uid"]} if claim is not None else {}
            shown.append({"metadata": {"name": pod.name, "labels": labels}, "status": status})
        return shown

    def claimed(self, claim: str) -> Pod:
        """The pod of a claim."""
        return next(pod for pod in self._pods.values() if pod.claim == claim)

    async def fail(self, claim: str) -> None:
        """The pod's container ends: the kernel killed its first process."""
        pod = self.claimed(claim)
        await self._stop(pod)
        pod.phase, pod.ready = "Failed", False
        self.changed()

    async def replace(self, claim: str) -> None:
        """The pod's node is lost, and the controller makes another pod."""
        pod = self.claimed(claim)
        pod.claim = ""
        await self._end(pod)
        pool = self.store.get("sandboxwarmpools", pod.pool)
        assert pool is not None
        self.store.change("sandboxclaims", claim, lambda one: one.update(status={}))
        self.changed()

    def cut(self) -> int:
        """Cuts every connection to a pod; returns how many."""
        cut = [task for pod in self._pods.values() for task in pod.connections]
        for task in cut:
            task.cancel()
        return len(cut)

    def _replenish(self, pool: Object) -> None:
        name = pool["metadata"]["name"]
        waiting = sum(1 for one in self._pods.values() if one.pool == name and not one.claim)
        for _ in range(pool["spec"].get("replicas", 1) - waiting):
            if self._make(pool) is None:
                return

    def _make(self, pool: Object) -> Pod | None:
        if self.quota is not None and len(self._pods) >= self.quota:
            return None
        name = f"{pool['metadata']['name']}-{secrets.token_hex(4)}"
        pod = Pod(name, pool["metadata"]["name"], self._folder / name, self._address())
        self._pods[name] = pod
        self._spawn(self._boot(pod, pool))
        return pod

    def _address(self) -> str:
        # No two stand-ins at once should take the same ones; the relay's bind would fail, and another is tried.
        self._next = (self._next + 1) % 64000
        return f"127.{self._net}.{self._next // 250}.{self._next % 250 + 2}"

    def _template(self, pool: Object) -> Object:
        template = self.store.get("sandboxtemplates", pool["spec"]["sandboxTemplateRef"]["name"])
        assert template is not None, "the suite applies both"
        spec: Object = template["spec"]["podTemplate"]["spec"]
        return spec

    def _image(self, pod: Pod) -> str:
        pool = self.store.get("sandboxwarmpools", pod.pool)
        return str(self._template(pool)["containers"][0]["image"]) if pool is not None else ""

    async def _boot(self, pod: Pod, pool: Object) -> None:
        while self.unschedulable or self.waiting is not None:
            await self._behaviour.wait()
        spec = self._template(pool)
        (container,) = spec["containers"]
        while pod.relay is None:
            try:
                pod.relay = await asyncio.start_server(
                    lambda reader, writer: self._relay(pod, reader, writer),
                    pod.address,
                    container["ports"][0]["containerPort"],
                )
            except OSError:
                pod.address = self._address()
        told = {"status.podIP": pod.address, "metadata.name": pod.name}
        environment = {one["name"]: told[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in container["env"]}
        if self.stranger:
            environment["POD_NAME"] = "somebody-else"
        pod.folder.mkdir(parents=True)
        port = str(container["ports"][0]["containerPort"])
        pod.machine = await machine.boot(
            pod.folder,
            "relay.py",
            ["--port", port, "--host", pod.address, "--", *container["command"]],
            environment,
            self._mounts(pod, spec, container),
        )
        pod.phase = "Running"
        ready = False
        while not ready:
            await asyncio.sleep(0.02)
            ready = await self._probe(pod)
        pod.ready = True
        self.changed()
        await pod.machine.process.wait()
        if pod.name in self._pods and pod.phase == "Running":
            pod.phase, pod.ready = "Failed", False
            self.changed()

    def _mounts(self, pod: Pod, spec: Object, container: Object) -> dict[str, Path]:
        mounts = {}
        for mount in container["volumeMounts"]:
            volume = next(one for one in spec["volumes"] if one["name"] == mount["name"])
            folder = pod.folder / f"volume-{mount['name']}"
            folder.mkdir()
            if "secret" in volume:
                content, mode = self.objects["Secret", volume["secret"]["secretName"]]["stringData"], 0o400
                assert volume["secret"]["defaultMode"] == mode
            else:
                content, mode = self.objects["ConfigMap", volume["configMap"]["name"]]["data"], 0o644
            for name, text in content.items():
                (folder / name).write_text(text)
                (folder / name).chmod(mode)
            mounts[mount["mountPath"]] = folder
        return mounts

    async def _probe(self, pod: Pod) -> bool:
        """As a kubelet's TCP probe: whether the port accepts, which the relay inside tries."""
        assert pod.machine is not None
        try:
            reader, writer = await asyncio.open_unix_connection(f"{pod.machine.socket}.up")
        except OSError:
            return False
        try:
            return await reader.read(1) == b"1"
        finally:
            writer.close()

    async def _relay(self, pod: Pod, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own: one that serves a connection may not be cancelled (until Python 3.12).
        carrying = asyncio.create_task(_carry(pod, reader, writer))
        pod.connections.add(carrying)
        await asyncio.wait([carrying])
        pod.connections.discard(carrying)
        writer.transport.abort()

    async def _stop(self, pod: Pod) -> None:
        for task in list(pod.connections):
            task.cancel()
        if pod.machine is not None:
            await pod.machine.kill()

    async def _end(self, pod: Pod) -> None:
        if pod.relay is not None:
            pod.relay.close()
        await self._stop(pod)
        if self._pods.pop(pod.name, None) is not None:
            self.store.remove("sandboxes", pod.name)
            await asyncio.to_thread(shutil.rmtree, pod.folder, ignore_errors=True)
        self.changed()


async def _carry(pod: Pod, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if pod.machine is None:
        return
    try:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(pod.machine.socket))
    except OSError:
        return
    both = [asyncio.create_task(_pump(reader, inner_writer)), asyncio.create_task(_pump(inner_reader, writer))]
    try:
        # Either direction's end is the connection's.
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        inner_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def _expired(claim: Object) -> bool:
    at = claim["spec"].get("lifecycle", {}).get("shutdownTime")
    now = datetime.datetime.now(datetime.UTC)
    return at is not None and datetime.datetime.fromisoformat(at) <= now
