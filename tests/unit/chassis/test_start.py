"""What a start of a service imports: not what only one backend, engine, exporter or client needs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from penstock_chassis import start

HEAVY = (
    *("cryptography", "docker", "e2b", "fsspec", "hf_sandbox", "httpx", "huggingface_hub", "kubernetes_asyncio"),
    *("opentelemetry", "pandas", "pyarrow", "pygments", "ray", "requests", "rich", "torch", "transformers", "typer"),
    *("urllib3", "vllm"),
)
"""What one backend, engine, exporter or client needs, or a terminal."""
OF_MODELS = ("jinja2", "numpy", "tokenizers")
OF_HTTP = ("aiohttp", "yarl")
OF_SCHEMAS = ("jmespath", "jsonschema", "referencing", "yaml")
NOT_IMPORTED = {
    # The driver seals what its journal has of secrets.
    "penstock_driver": (
        *(name for name in HEAVY if name != "cryptography"),
        *OF_MODELS,
        *OF_HTTP,
        "jsonschema",
        "referencing",
    ),
    "penstock_sandbox": (*HEAVY, *OF_MODELS, *OF_HTTP, *OF_SCHEMAS),
    "penstock_inference": (*HEAVY, *OF_HTTP, *OF_SCHEMAS),
    "penstock_interception": (*HEAVY, "jmespath", "yaml"),
}


STARTED = """
import runpy, sys
name, sys.argv[1:] = sys.argv[1], ["--help"]
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
finally:
    sys.stderr.write("\\n".join(sys.modules))
"""


@pytest.mark.parametrize("module", sorted(NOT_IMPORTED))
def test_a_start_of_a_service_imports_nothing_that_it_may_not_need(module: str) -> None:
    """All imports of a `main` are done when it prints its settings' help; they take most of a start's CPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "PYTHON"))}
    argv = [sys.executable, "-c", STARTED, module]
    done = subprocess.run(argv, env=kept, capture_output=True, text=True, check=True)
    imported = set(done.stderr.split())
    assert {f"{module}.app", "penstock_chassis.server", "structlog"} <= imported
    assert {name.partition(".")[0] for name in imported} & set(NOT_IMPORTED[module]) == set()


def test_the_garbage_collector_rests_during_imports_alone() -> None:
    """It runs afterwards, also when an import fails; whoever has switched it off keeps it so."""
    with start.imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), start.imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with start.imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_rich_can_be_imported_after_a_start() -> None:
    """Only structlog's import is kept from it."""
    program = (
        "from penstock_chassis import start\n"
        "with start.imports():\n    import structlog.dev\n"
        "assert structlog.dev.rich is None\nimport rich\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


READS_EXPERIMENTS = """
import os
from penstock_chassis import start

with start.imports():
    import grpc.aio
print(os.environ.get("GRPC_EXPERIMENTS", ""))
"""


def _started(**set_before: str) -> tuple[str, str]:
    """gRPC's experiments in a process that begins as a service does, and what it complains of."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    argv = [sys.executable, "-c", READS_EXPERIMENTS]
    done = subprocess.run(argv, env=kept | set_before, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.requirement("R126")
def test_the_installed_grpc_knows_the_experiments_that_make_calls_cheaper() -> None:
    """With a version that does not, every call costs more: see decision 098."""
    assert _started() == ("-event_engine_client,-event_engine_listener", "")
    experiments, complaints = _started(GRPC_EXPERIMENTS="-no_such_thing")
    assert experiments == "-no_such_thing" and "no_such_thing" in complaints, "gRPC has read them before"
