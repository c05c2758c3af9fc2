"""Tools of a task in real rollouts: the guide's commands, and agents that try to change what grades them."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio
from tests.integration.docs.blocks import ALL, commands
from tests.support.endpoints import debian
from tests.support.endpoints.package_index import (
    PASSWORD,
    USER,
    Index,
    index,
    integrity,
    line,
    npm_lock,
    npm_package,
    wheel,
)
from tests.support.services.stack import Running, running

from penstock.client import Command, InvalidArgument, Packages, SandboxChoice, Task, Verifier
from penstock.client.transport.endpoints import write_connection
from penstock.client.types.results import RolloutResult
from penstock.tasks.scaffold import write
from penstock.tasks.scripts import script
from penstock.tasks.solutions import solving_agent

PAGE = "docs/guides/pytest.md"
MOUNT = "/opt/penstock/toolboxes/task-packages"
HOSTILE = {
    "changes the tools": f"rm -rf {MOUNT}; echo > {MOUNT}/python/bin/pytest; chmod 777 {MOUNT}/python; "
    f"mv {MOUNT}/python {MOUNT}/gone; mount --bind src {MOUNT}; true",
    "plants a conftest": "printf 'import os\\nos._exit(0)\\n' | tee conftest.py checks.py src/conftest.py; "
    "mkdir -p checks; cp conftest.py checks/",
    "plants modules in the home": "place=$(python3 -c 'import site; print(site.getusersitepackages())'); "
    "mkdir -p $place; echo 'import os; os._exit(0)' > $place/usercustomize.py; cp $place/usercustomize.py pytest.py; "
    "mkdir -p ~/bin ~/.local/bin; printf '#!/bin/sh\\nexit 0\\n' | tee ~/bin/pytest ~/.local/bin/pytest > pytest; "
    "chmod 755 pytest ~/bin/pytest ~/.local/bin/pytest; echo 'export PATH=~/bin:$PATH' > ~/.profile",
    "plants a configuration": "printf '[pytest]\\naddopts = --collect-only\\n' | tee pytest.ini src/pytest.ini",
    "ends the process that imports it": "echo 'import os; os._exit(0)' > src/slug.py",
    "plants a sitecustomize": "echo 'import os; os._exit(0)' | tee src/sitecustomize.py sitecustomize.py "
    "src/usercustomize.py",
}


async def after(stack: Running, task: Task, commands: str) -> RolloutResult:
    """The result of an agent that ran these commands."""
    done = replace(task, instruction=script([Command(shell=commands)]), solution=None)
    handle = await stack.ps.rollouts.create(done, await solving_agent(stack.ps), mode="transparent_proxy")
    return await handle.result()


@pytest.mark.requirement("R151")
async def test_the_commands_of_the_guide_to_pytest_run_as_printed(stack: Running, tmp_path: Path) -> None:
    """In order, in one directory: written, checked, proved, and tried by an agent."""
    connection = tmp_path / "connection.json"
    write_connection(connection, stack.stack.endpoints, pid=os.getpid())
    environment = {**os.environ, "PENSTOCK_CONNECTION": str(connection)}
    shown = [one for block in ALL if block.page == PAGE and block.kind == "sh" for one in commands(block)]
    ours = [one.line for one in shown if one.line.startswith("penstock ")]
    assert len(ours) == 4
    for text in ours:
        argv = text.replace("--agent opencode", "--agent shell").split()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", *argv[1:]),
            stdout=PIPE,
            stderr=PIPE,
            cwd=tmp_path,
            env=environment,
        )
        out, err = await process.communicate()
        assert process.returncode == 0 or argv[1] == "rollout", f"{text}: {out.decode()}{err.decode()}"
        if argv[1] == "rollout":
            assert b"reward" in out + err and b"INSTALL" not in out + err, out.decode() + err.decode()
    assert (tmp_path / "fix-slug" / "task.yaml").is_file()


@pytest.mark.requirement("R151")
@pytest.mark.parametrize("attack", HOSTILE)
async def test_an_agent_that_attacks_the_tools_is_graded_by_its_work(
    stack: Running, tmp_path: Path, attack: str
) -> None:
    """Undone work is worth nothing, whatever it left where; done work beside it is worth all."""
    write(tmp_path / "fix-slug")
    task = Task.load(tmp_path / "fix-slug")
    attacked = await after(stack, task, HOSTILE[attack])
    assert attacked.failure is None and attacked.reward is not None, attacked
    assert attacked.reward.value == 0.0
    if "src/" in HOSTILE[attack]:
        return
    solution = (tmp_path / "fix-slug/solution/slug.py").read_text()
    worked = await after(stack, task, f"cat > src/slug.py <<'END'\n{solution}END\n{HOSTILE[attack]}")
    assert worked.reward is not None and worked.reward.value == 1.0


DEBIAN_FILES = {
    "usr/bin/greet": '#!/bin/sh\ncat "/usr/lib/greet/text"\n',
    "lib/greet/text": "hello\n",
    # Of the host's programs, and of our own files.
    "usr/bin/tac": "#!/bin/sh\necho of the package\n",
    "etc/greet.conf": "loud\n",
    "etc/hostname": "planted\n",
}
USES_DEBIAN = (
    'test "$(greet)" = hello && test "$(tac)" = "of the package" && test "$(cat /etc/greet.conf)" = loud && '
    'test "$(cat /etc/hostname)" = sandbox && test "$(echo still there | cat)" = "still there"'
)
CHANGES_DEBIAN = "touch /usr/bin/x /usr/lib/greet/x /etc/x; echo x > /usr/bin/greet; rm -f /usr/bin/greet; true"

WithIndex: TypeAlias = tuple[Running, Index]


@pytest.fixture(scope="module")
def mirror() -> Iterator[Index]:
    """A mirror of Debian packages."""
    with index() as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def with_index(tmp_path_factory: pytest.TempPathFactory, mirror: Index) -> AsyncIterator[WithIndex]:
    """A stack whose sandbox service asks an index on loopback, with a password."""
    home = tmp_path_factory.mktemp("home")
    with index(password=True) as served, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().startswith("npm_config_")]:
            patch.delenv(name)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            patch.delenv(name, raising=False)
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        host = served.url.removeprefix("http:")
        settings = {"sandbox": {"debian_mirrors": [f"{mirror.url}/debian"]}}
        (home / ".npmrc").write_text(f"registry={served.url}/npm/\n{host}/npm/:_auth={secret}\n")
        patch.setenv("HOME", str(home))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_INDEX_URL", f"{served.with_password}/simple/")
        async with running(tmp_path_factory.mktemp("stack-with-index"), settings, agents=False) as started:
            yield started, served


@pytest.mark.requirement("R151")
async def test_setup_agent_verifier_and_episodes_have_the_tools_of_both_locks(with_index: WithIndex) -> None:
    """From the service's own index, whose address and password no sandbox has."""
    stack, served = with_index
    tool = wheel("tool", {"tool.py": "def main():\n    print('ran tool')\n"}, {"run-tool": "tool:main"})
    served.add_python("tool-1.0-py3-none-any.whl", tool)
    manifest = {"name": "webtool", "version": "1.0.0", "bin": {"webtool": "cli.js"}, "main": "cli.js"}
    archive = npm_package(manifest, {"cli.js": "#!/usr/bin/env node\nconsole.log('ran webtool')\n"})
    served.add_npm("webtool", "1.0.0", archive, manifest)
    entry = {"version": "1.0.0", "integrity": integrity(archive), "bin": {"webtool": "cli.js"}}
    uses = (
        'test "$(run-tool)" = "ran tool" && test "$(python3 -c "import tool; tool.main()")" = "ran tool" && '
        'test "$(webtool)" = "ran webtool" && test "$(node -e "require(\'webtool\')")" = "ran webtool"'
    )
    hidden = f"! env | grep -e {PASSWORD} -e PIP_ -e npm_config && ! grep -rqs {PASSWORD} {MOUNT} ~ /workspace /etc"
    task = Task(
        task_id="tools",
        instruction=script([Command(shell=f"{uses} && touch worked")]),
        setup=[Command(shell=uses), Command(shell=uses, env={"PYTHONPATH": "src"})],
        verifier=Verifier(
            commands=[Command(shell=uses), Command(shell=hidden), Command(argv=["test", "-f", "worked"])]
        ),
        sandbox=SandboxChoice(
            packages=Packages(
                python=f"{line('tool', tool)}absent==1.0 ; python_version < '3' --hash=sha256:{'0' * 64}\n",
                npm=npm_lock({"webtool": entry}),
            )
        ),
    )
    handle = await stack.ps.rollouts.create(task, await solving_agent(stack.ps), mode="transparent_proxy")
    result = await handle.result()
    assert result.failure is None and result.reward is not None and result.reward.value == 1.0, result
    async with await stack.ps.terminals.open(replace(task, instruction="Use them.", verifier=None)) as terminal:
        assert "ran tool" in (await terminal.run("run-tool")).text()
        assert "ran webtool" in (await terminal.run("webtool")).text()
    assert served.fetched["/files/tool-1.0-py3-none-any.whl"] == 1
    assert PASSWORD not in stack.logs


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    ("packages", "field", "reason"),
    [
        (Packages(python="pytest==8.0"), "spec.sandbox.packages.python", "has no --hash"),
        (Packages(python=f"a==1 ; 1 --hash=sha256:{'0' * 64}"), "spec.sandbox.packages.python", "is not a condition"),
        (Packages(npm="{}"), "spec.sandbox.packages.npm", "lockfileVersion 2 or 3"),
    ],
)
async def test_a_lock_is_refused_by_its_field_before_anything_starts(
    with_index: WithIndex, packages: Packages, field: str, reason: str
) -> None:
    stack, _ = with_index
    task = Task(task_id="refused", instruction="Nothing.", sandbox=SandboxChoice(packages=packages))
    with pytest.raises(InvalidArgument) as caught:
        await stack.ps.rollouts.create(task, await solving_agent(stack.ps), mode="transparent_proxy")
    (violation,) = caught.value.violations
    assert violation.field == field and reason in violation.description


@pytest.mark.requirement("R151")
async def test_a_package_that_the_index_lacks_fails_the_rollout_once(with_index: WithIndex) -> None:
    """The message names the field, the package and what to do; nothing is tried again."""
    stack, _ = with_index
    packages = Packages(python=f"absent==1.0 --hash=sha256:{'0' * 64}")
    task = Task(task_id="absent", instruction="Nothing.", sandbox=SandboxChoice(packages=packages))
    handle = await stack.ps.rollouts.create(
        task, await solving_agent(stack.ps), mode="transparent_proxy", max_attempts=3
    )
    failure = (await handle.result()).failure
    assert failure is not None and failure.reason == "INSTALL_FAILED" and not failure.retriable
    assert failure.message.startswith("sandbox.packages: pip install failed (NOT_FOUND)")


@pytest.mark.requirement("R151")
async def test_debian_packages_are_under_the_root_of_each_sandbox_of_a_task(
    with_index: WithIndex, mirror: Index, tmp_path: Path
) -> None:
    """In setup, agent, verifier and episodes: over the host's programs, below our own files, unchangeable."""
    stack, _ = with_index
    content = debian.package(tmp_path, "greet", DEBIAN_FILES)
    mirror.files[f"/debian/{debian.path_of('greet')}"] = content
    task = Task(
        task_id="debian",
        setup=[Command(shell=USES_DEBIAN)],
        instruction=script([Command(shell=f"{CHANGES_DEBIAN}; {USES_DEBIAN} && touch worked")]),
        verifier=Verifier(commands=[Command(shell=USES_DEBIAN), Command(argv=["test", "-f", "worked"])]),
        sandbox=SandboxChoice(packages=Packages(debian=debian.line("greet", content))),
    )
    group = await stack.ps.groups.create(task, await solving_agent(stack.ps), n=2, mode="transparent_proxy")
    results = await group.results()
    assert [(result.failure, result.reward and result.reward.value) for result in results] == [(None, 1.0)] * 2
    async with await stack.ps.terminals.open(replace(task, instruction="Use them.", verifier=None)) as terminal:
        assert "hello" in (await terminal.run("greet")).text()
    assert mirror.fetched[f"/debian/{debian.path_of('greet')}"] == 1


@pytest.mark.requirement("R151", "R64")
async def test_debian_packages_that_cannot_be_installed_are_refused_by_name(with_index: WithIndex) -> None:
    """A wrong lock by its field, before anything starts; an unknown package once."""
    stack, _ = with_index
    agent = await solving_agent(stack.ps)
    task = Task(task_id="refused", instruction="Nothing.", sandbox=SandboxChoice(packages=Packages(debian="jq")))
    with pytest.raises(InvalidArgument) as caught:
        await stack.ps.rollouts.create(task, agent, mode="transparent_proxy")
    (violation,) = caught.value.violations
    assert violation.field == "spec.sandbox.packages.debian" and "penstock tasks lock" in violation.description
    packages = Packages(debian=debian.line("absent", b""))
    handle = await stack.ps.rollouts.create(
        replace(task, sandbox=SandboxChoice(packages=packages)), agent, mode="transparent_proxy", max_attempts=3
    )
    failure = (await handle.result()).failure
    assert failure is not None and failure.reason == "INSTALL_FAILED" and not failure.retriable
    assert failure.message.startswith("sandbox.packages: Debian packages: NOT_FOUND: absent=1.0")
