"""kubectl and Helm, as a stack on Kubernetes uses them. They get secrets by standard input only."""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.client.errors import ConfigurationError
from penstock.local.processes import StackFailed

_IN_PACKAGE: Final = Path(__file__).with_name("chart")
"""The chart, in an installed package."""
_IN_CHECKOUT: Final = Path("deploy", "helm", "penstock")
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REQUEST: Final = "--request-timeout=30s"
_LONGEST: Final = 2_000


def chart() -> Path:
    """Returns the directory of the Helm chart: the package's, or that of the checkout it runs in."""
    if _IN_PACKAGE.is_dir():
        return _IN_PACKAGE
    for parent in Path(__file__).resolve().parents:
        if (parent / _IN_CHECKOUT / "Chart.yaml").is_file():
            return parent / _IN_CHECKOUT
    raise ConfigurationError(
        "The Helm chart is not in this installation of penstock: install it from a wheel, or from a clone of the "
        "repository.",
        reason="CHART_MISSING",
    )


def is_inside(context: str) -> bool:
    """Whether this program runs in a pod of the cluster that it is to use."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG") and not context)


class Tools:
    """Both programs, for one context of the kubeconfig; empty = its current one, or the pod's own account."""

    def __init__(self, context: str) -> None:
        self._context = context

    def find(self) -> None:
        """Raises ConfigurationError, if one of them is not in PATH."""
        if shutil.which("kubectl") is None:
            raise ConfigurationError(
                _absent("kubectl", "https://kubernetes.io/docs/tasks/tools"), reason="KUBECTL_MISSING"
            )
        if shutil.which("helm") is None:
            raise ConfigurationError(
                _absent("helm", "https://helm.sh/docs/intro/install, version 3 or 4"), reason="HELM_MISSING"
            )

    async def namespace(self) -> str:
        """Returns the namespace of the context, or of the pod's account. Raises ConfigurationError."""
        if is_inside(self._context) and _ACCOUNT.exists():
            return _ACCOUNT.read_text(encoding="utf-8").strip()
        try:
            found = orjson.loads(await self.kubectl("config", "view", "--minify", "--output=json"))
        except StackFailed as error:
            raise ConfigurationError(
                f"No cluster is configured ({error}): set KUBECONFIG or the context, or run this in a pod.",
                reason="KUBERNETES_NOT_CONFIGURED",
            ) from None
        return str(found["contexts"][0]["context"].get("namespace") or "default")

    async def kubectl(self, *words: str, data: bytes | None = None) -> str:
        """Runs kubectl; returns what it printed. Raises StackFailed with what it said."""
        return await _run(self.kubectl_command(_REQUEST, *words), words[0], data)

    def kubectl_command(self, *words: str) -> Sequence[str]:
        """Returns the command line of kubectl."""
        return ("kubectl", *((f"--context={self._context}",) if self._context else ()), *words)

    async def helm(self, *words: str, data: bytes | None = None) -> str:
        """Runs Helm; returns what it printed. Raises StackFailed with what it said."""
        context = (f"--kube-context={self._context}",) if self._context else ()
        return await _run(("helm", *words, *context), words[0], data)

    async def listed(self, kinds: str, namespaces: Sequence[str], selector: str) -> Sequence[Mapping[str, Any]]:
        """Returns all objects of these kinds (`pods,secrets`) with a label. Raises StackFailed."""
        found: list[Mapping[str, Any]] = []
        for namespace in namespaces:
            words = ("get", kinds, f"--namespace={namespace}", f"--selector={selector}", "--output=json")
            found += orjson.loads(await self.kubectl(*words))["items"]
        return found


def _absent(program: str, where: str) -> str:
    return (
        f"A stack on Kubernetes needs {program}, which is not in PATH: install it ({where}). In a clone of the "
        "repository `make helm` brings Helm and kubectl into deploy/.toolchain, for Linux on x86-64: add that "
        "directory to PATH."
    )


async def _run(command: Sequence[str], verb: str, data: bytes | None) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL if data is None else PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        printed, errors = await process.communicate(data)
    except BaseException:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        raise
    if process.returncode:
        said = " ".join(errors.decode(errors="replace").split())[-_LONGEST:]
        raise StackFailed(f"`{command[0]} {verb}` failed: {said}", reason="KUBERNETES_FAILED")
    return printed.decode(errors="replace")
