"""A completion as `penstock export --table turns` writes it, for tests that need no rollout around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client.types.chat import Completion


def turn_row(name: str, prompt: Sequence[int], done: Completion) -> dict[str, Any]:
    """The row of a turn whose call is `name`."""
    assert done.token_ids is not None and done.logprobs is not None and done.sampling_used is not None
    return {
        "rollout_id": f"rollout-{name}",
        "call_id": name,
        "prompt_token_ids": list(prompt),
        "completion_token_ids": done.token_ids.tolist(),
        "completion_logprobs": done.logprobs.tolist(),
        "logprobs_mode": str(done.logprobs_mode),
        "policy_spans": [{"policy_version": v.policy_version, "start": v.start, "end": v.end} for v in done.versions],
        "sampling_used": {"temperature": done.sampling_used.temperature, "top_p": done.sampling_used.top_p},
    }
