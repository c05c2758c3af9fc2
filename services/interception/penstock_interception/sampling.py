"""Sampling put together from what the agent asked, what the rollout overrides and what the budgets allow."""

from __future__ import annotations

from dataclasses import fields, replace

from penstock_codec.chat import Sampling

_UNSET = Sampling()


def with_max_tokens(sampling: Sampling, limit: int | None) -> Sampling:
    """The same with this limit; None is none."""
    return sampling if sampling.max_tokens == limit else replace(sampling, max_tokens=limit)


def merged(base: Sampling, override: Sampling) -> Sampling:
    """`base` with every field that `override` sets."""
    if override == _UNSET:
        return base
    changes = {f.name: value for f in fields(override) if (value := getattr(override, f.name)) is not None}
    return replace(base, **changes)
