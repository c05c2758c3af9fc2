"""The backend of Kubernetes: pods of kubernetes-sigs/agent-sandbox, claimed from its warm pools."""

from __future__ import annotations

from penstock_sandbox.backends.kubernetes.backend import KubernetesBackend, KubernetesOptions
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.settings import SandboxSettings


def kubernetes_backend(settings: SandboxSettings) -> Backend:
    """Returns the backend, built from the settings."""
    return KubernetesBackend(
        KubernetesOptions(
            state_dir=settings.state_dir / "kubernetes",
            namespace=settings.kubernetes_namespace,
            warm_pool=settings.kubernetes_warm_pool,
            allowed_warm_pools=settings.kubernetes_allowed_warm_pools,
            keys=settings.kubernetes_keys,
            kubeconfig=settings.kubernetes_config,
            context=settings.kubernetes_context,
            port=settings.kubernetes_port,
            creates_per_s=settings.kubernetes_creates_per_s,
            ready_timeout_s=settings.kubernetes_ready_timeout_s,
            delete_timeout_s=settings.kubernetes_delete_timeout_s,
            layer_bytes=settings.snapshot_cache_bytes,
            allow_open_network=settings.allow_open_network,
        ),
        wait=settings.default_backend == "kubernetes",
    )
