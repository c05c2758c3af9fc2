"""The E2B backend: sandboxes of E2B's cloud, or of a compatible deployment, through E2B's own SDK."""

from __future__ import annotations

import os

from pydantic import SecretStr

from penstock_sandbox.backends.e2b.backend import E2BBackend, E2BOptions
from penstock_sandbox.backends.e2b.cloud import Address
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.settings import SandboxSettings


def e2b_backend(settings: SandboxSettings) -> Backend:
    """Returns the E2B backend, built from the settings; E2B's own environment variables are the defaults."""
    key = settings.e2b_api_key or SecretStr(os.environ.get("E2B_API_KEY", "").strip())
    address = Address(
        key,
        domain=settings.e2b_domain or os.environ.get("E2B_DOMAIN", ""),
        api_url=settings.e2b_api_url or os.environ.get("E2B_API_URL", ""),
        sandbox_url=settings.e2b_sandbox_url or os.environ.get("E2B_SANDBOX_URL", ""),
    )
    return E2BBackend(
        E2BOptions(
            state_dir=settings.state_dir / "e2b",
            address=address if key.get_secret_value() else None,
            template=settings.e2b_template,
            allowed_templates=settings.e2b_allowed_templates,
            max_lifetime_s=settings.e2b_max_lifetime_s,
            allow_open_network=settings.allow_open_network,
        )
    )
