"""What several suites share: one real stack a session, for tests that only add rollouts to it."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog
from hypothesis import HealthCheck, settings
from tests import on_demand, sharing
from tests.support.absent import absent
from tests.support.docker import dockerd
from tests.support.services import forking
from tests.support.services.stack import Running, running

# How long an example takes, and making it, is the machine's business.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# What JAX compiles for one test or for a program of another is compiled once a machine: half of what such a test takes.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# Without it, each logged exception shows all variables of all its frames: seconds of a test's event loop.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

HERE = Path(__file__).parent
ON_THE_STACK = tuple(HERE / folder for folder in ("conformance/agents", "e2e", "integration/evaluation", "security"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--backend NAME` is the sandbox conformance suite on one backend, whole; `--full` leaves nothing out anywhere."""
    parser.addoption("--backend", action="append", default=[], help="sandbox conformance on this one only, all of it")
    parser.addoption("--full", action="store_true", help="also what is left out elsewhere (tests/on_demand.py)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What collecting makes is never garbage: a sixth of its time would go into looking for some, and later collections
    would look through all of it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The stack's client lives on the session's loop, and so do the tests that use it."""
    on_demand.deselect(config, items)
    for item in items:
        used = any(item.path.is_relative_to(folder) for folder in ON_THE_STACK)
        if used and inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each reason of skips, with the number of tests; pytest has a line for each place in the code. And a
    line for what was left out, so that nobody takes it for passed."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, count in reasons.most_common():
        terminalreporter.line(f"SKIPPED [{count}] {reason}")
    ran = [report.nodeid for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    for line in on_demand.lines(terminalreporter.config, ran):
        terminalreporter.line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What one of several processes left out."""
    on_demand.received(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> sharing.Sharing | None:
    """What several processes run each."""
    return sharing.scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Programs that tests start can be interrupted, also where who started the tests ignores SIGINT (a shell's `&`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def root() -> None:
    """For tests that change owners, mount or become another user."""
    if os.geteuid() != 0:
        absent("this test needs root")


@pytest.fixture(scope="session", autouse=True)
def forked_starts(interruptible: None) -> Iterator[None]:
    """Services and commands that tests start need no second import; see `tests.support.services.forking`."""
    with forking.installed():
        yield


@pytest.fixture
def genuine_starts() -> Iterator[None]:
    """What the test starts is started as its users start it: for tests of the start itself."""
    with forking.genuine():
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory, forked_starts: None) -> AsyncIterator[Running]:
    """Four service processes with tokens on, and a client with the operator's. Tests use it from the session's loop."""
    async with running(tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def docker_engine() -> Iterator[None]:
    """Ends the engine that a test may have started; see `tests.support.docker.dockerd`."""
    yield
    dockerd.stop()
