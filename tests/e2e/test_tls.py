"""A stack whose ingress and inference service speak TLS, as they do where services are not on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.copying import copy_task, finish
from tests.support.services.stack import running

from penstock.cli.commands.credentials import make
from penstock.client import Inference, Mode


@pytest.mark.requirement("R9", "R14")
async def test_model_calls_use_tls_from_sandbox_to_ingress_to_engine(
    tmp_path: Path,
) -> None:
    """The agent speaks plainly to its own loopback and holds no certificate; everything beyond is verified."""
    tmp_path.chmod(0o755)
    place = tmp_path / "credentials"
    make(place, (), 1)
    ca = str(place / "ca.pem")
    settings: dict[str, dict[str, Any]] = {
        "inference": {"tls_cert": str(place / "inference.pem"), "tls_key": str(place / "inference.key")},
        "interception": {
            "inference_ca": ca,
            "ingress_tls_cert": str(place / "interception.pem"),
            "ingress_tls_key": str(place / "interception.key"),
        },
        "sandbox": {"allowed_upstreams": ["tls:127.0.0.1:*"], "upstream_ca": ca},
    }
    state = tmp_path / "stack"
    state.mkdir(mode=0o755)
    async with running(state, settings, agents=False) as stack:
        handle = await stack.ps.rollouts.create(
            copy_task(stack), "shell", mode=Mode.TRANSPARENT_PROXY, source=Inference()
        )
        finished = await finish(handle)
        assert finished.reward == 1.0, finished.agent_said() + stack.logs
        trajectory = await handle.trajectory()
        assert len(trajectory.calls) == 2
