"""Who answers an agent's model calls, as the commands that run agents are told: an engine of theirs, or an upstream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from penstock.cli.console import usage_error
from penstock.cli.services import ModelChoice, services
from penstock.cli.up import api_key, is_url
from penstock.client import Penstock, Upstream

_NO_MODEL: Final = "there is no model to ask: give --model-dir DIR, or --upstream URL --model M"


def answerer(upstream: str | None, model: str, api_key_env: str | None) -> Upstream | None:
    """The upstream that the options name; None = the inference service. Wrong ones end the program."""
    if upstream is None:
        if model or api_key_env:
            usage_error("--model and --api-key-env belong to --upstream")
        return None
    key = api_key(api_key_env)
    if not is_url(upstream):
        if any(mark in upstream for mark in ":/@ "):
            usage_error("an upstream is a URL like http://host:port/v1, or a name that `up --upstream NAME=URL` set")
        return Upstream(name=upstream, model=model)
    if not model:
        usage_error("--upstream URL needs --model M: which of its models shall answer")
    return Upstream(base_url=upstream, api_key=key, model=model)


@asynccontextmanager
async def answered(
    choice: ModelChoice, upstream: Upstream | None, *, state_dir: Path | None = None
) -> AsyncIterator[Penstock]:
    """Services that have a model to ask; where there is none the program ends."""

    def before_start() -> None:
        if upstream is None and not choice.given:
            usage_error(_NO_MODEL)
        if upstream is not None and upstream.name:
            name = upstream.name
            usage_error(f"nobody knows the upstream {name}: start `penstock up --upstream {name}=URL` first")

    async with services(choice, state_dir=state_dir, before_start=before_start) as ps:
        if upstream is None and not ps.endpoints.inference:
            usage_error(_NO_MODEL)
        yield ps
