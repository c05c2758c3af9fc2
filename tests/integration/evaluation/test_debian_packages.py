"""Debian packages of a task in real rollouts on the local backend, and their refusal elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.endpoints.debian import line, package, path_of
from tests.support.endpoints.package_index import Index, index
from tests.support.services.stack import Running, running

from penstock.client import Command, InvalidArgument, Packages, SandboxChoice, Task, Verifier
from penstock.tasks.solutions import script, solving_agent

FILES = {
    "usr/bin/greet": '#!/bin/sh\ncat "/usr/lib/greet/text"\n',
    "lib/greet/text": "hello\n",
    # Of the host's programs, and of our own files.
    "usr/bin/tac": "#!/bin/sh\necho of the package\n",
    "etc/greet.conf": "loud\n",
    "etc/hostname": "planted\n",
}
USES = (
    'test "$(greet)" = hello && test "$(tac)" = "of the package" && test "$(cat /etc/greet.conf)" = loud && '
    'test "$(cat /etc/hostname)" = sandbox && test "$(echo still there | cat)" = "still there"'
)
CHANGES = "touch /usr/bin/x /usr/lib/greet/x /etc/x; echo x > /usr/bin/greet; rm -f /usr/bin/greet; true"


@pytest.fixture(scope="module")
def mirror() -> Iterator[Index]:
    with index() as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory, mirror: Index) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("stack")
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "http_proxy"):
            patch.delenv(name, raising=False)
        settings = {"debian_mirrors": [f"{mirror.url}/debian"]}
        async with running(folder, {"sandbox": settings}, agents=False) as started:
            yield started


@pytest.mark.requirement("R151")
async def test_setup_agent_verifier_and_episodes_have_the_packages(
    stack: Running, mirror: Index, tmp_path: Path
) -> None:
    """Under their root, over the host's programs and below our own files; no sandbox can change them."""
    content = package(tmp_path, "greet", FILES)
    mirror.files[f"/debian/{path_of('greet')}"] = content
    task = Task(
        task_id="debian",
        setup=[Command(shell=USES)],
        instruction=script([Command(shell=f"{CHANGES}; {USES} && touch worked")]),
        verifier=Verifier(commands=[Command(shell=USES), Command(argv=["test", "-f", "worked"])]),
        sandbox=SandboxChoice(packages=Packages(debian=line("greet", content))),
    )
    group = await stack.ps.groups.create(task, await solving_agent(stack.ps), n=2, mode="transparent_proxy")
    results = await group.results()
    assert [(result.failure, result.reward and result.reward.value) for result in results] == [(None, 1.0)] * 2
    async with await stack.ps.terminals.open(replace(task, instruction="Use them.", verifier=None)) as terminal:
        assert "hello" in (await terminal.run("greet")).text()
    assert mirror.fetched == {f"/debian/{path_of('greet')}": 1}


@pytest.mark.requirement("R151", "R64")
async def test_what_cannot_be_installed_is_refused_by_name(stack: Running) -> None:
    """A wrong lock by its field, before anything starts; an unknown package once."""
    agent = await solving_agent(stack.ps)
    task = Task(task_id="refused", instruction="Nothing.", sandbox=SandboxChoice(packages=Packages(debian="jq")))
    with pytest.raises(InvalidArgument) as caught:
        await stack.ps.rollouts.create(task, agent, mode="transparent_proxy")
    (violation,) = caught.value.violations
    assert violation.field == "spec.sandbox.packages.debian" and "penstock tasks lock" in violation.description
    packages = Packages(debian=line("absent", b""))
    handle = await stack.ps.rollouts.create(
        replace(task, sandbox=SandboxChoice(packages=packages)), agent, mode="transparent_proxy", max_attempts=3
    )
    failure = (await handle.result()).failure
    assert failure is not None and failure.reason == "INSTALL_FAILED" and not failure.retriable
    assert failure.message.startswith("sandbox.packages: Debian packages: NOT_FOUND: absent=1.0")
