"""Why a claim has no sandbox yet: what is hopeless and fails at once, and what the deadline's error should say.

The conditions of a claim say little ("Pod exists with phase: Pending"), so its pod is asked: the scheduler's and the
kubelet's own words are in its status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, PenstockError, ResourceExhausted, Unavailable
from penstock_sandbox.backends.kubernetes.cluster import ClaimState
from penstock_sandbox.backends.kubernetes.errors import is_quota, over_quota

_NO_POOL: Final = frozenset({"TemplateNotFound", "WarmPoolNotFound"})
_REFUSED: Final = frozenset({"InvalidMetadata", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError"})
_ENDED: Final = frozenset({"ClaimExpired", "SandboxExpired", "PodFailed", "PodSucceeded"})
_IMAGE: Final = frozenset({"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_CRASHED: Final = frozenset({"CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError"})
_LONGEST: Final = 300
_RETRY_S: Final = 10.0


def hopeless(claim: ClaimState, pods: Sequence[Any] = ()) -> PenstockError | None:
    """Returns the error of a claim for which waiting is useless, or None."""
    message = _cut(claim.message)
    if is_quota(claim.message):
        return over_quota(message)
    if claim.reason in _NO_POOL:
        return _unavailable(f"the cluster has no such warm pool or template: {message}; apply the guide's manifests")
    if claim.reason in _REFUSED:
        return _unavailable(f"the controller refuses the claim ({claim.reason}): {message}")
    if claim.finished or claim.reason in _ENDED:
        return FailedPrecondition(
            f"the sandbox's pod ended as it started ({claim.finished or claim.reason}): see `kubectl logs` of pods "
            "of the template; its container must run the entrypoint as root",
            reason="TEMPLATE_UNSUITABLE",
        )
    for status in (status for pod in pods for status in _containers(pod)):
        waiting = status.state.waiting if status.state is not None else None
        if waiting is not None and waiting.reason in _IMAGE:
            return Unavailable(
                f"the template's image {status.image!r} cannot be pulled ({waiting.reason}): correct its name, or "
                f"give the template imagePullSecrets ({_cut(waiting.message)})",
                reason="IMAGE_PULL_FAILED",
                retry_after_s=_RETRY_S,
            )
        if waiting is not None and waiting.reason in _CRASHED:
            return FailedPrecondition(
                f"the template's container does not start ({waiting.reason}): {_cut(waiting.message)}; "
                "see `kubectl describe pod`",
                reason="TEMPLATE_UNSUITABLE",
            )
    return None


def too_late(claim: ClaimState | None, pods: Sequence[Any], waited_s: float) -> PenstockError:
    """Returns the error of a claim that was not ready in time."""
    for pod in pods:
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return ResourceExhausted(
                    f"no node had room for the sandbox's pod within {waited_s:g} s: add nodes, lower the template's "
                    f"requests, or delete sandboxes ({_cut(condition.message)})",
                    reason="POD_UNSCHEDULABLE",
                    retry_after_s=_RETRY_S,
                )
    state = "the controller has not looked at it: is agent-sandbox running?"
    if claim is not None and claim.reason:
        state = f"{claim.reason}: {_cut(claim.message)}"
    return DeadlineExceeded(
        f"the sandbox was not ready within {waited_s:g} s ({state}): see `kubectl describe sandboxclaim`, or raise "
        "kubernetes_ready_timeout_s",
        reason="POD_NOT_READY",
    )


def out_of_memory(pods: Sequence[Any]) -> bool:
    """Whether the kernel ended one of these pods' containers because its memory was used up."""
    ended = [status.state.terminated for pod in pods for status in _containers(pod) if status.state is not None]
    return any(one is not None and one.reason == "OOMKilled" for one in ended)


def _containers(pod: Any) -> list[Any]:
    status = pod.status
    return [*(status.init_container_statuses or ()), *(status.container_statuses or ())]


def _cut(text: str | None) -> str:
    return " ".join((text or "no message").split())[:_LONGEST]


def _unavailable(message: str) -> PenstockError:
    return FailedPrecondition(message, reason="BACKEND_UNAVAILABLE", metadata={"backend": "kubernetes"})
