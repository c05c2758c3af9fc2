"""The agent of an attack: its program in a spec like any other agent's."""

import base64
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from penstock.client.connection import Penstock
from penstock.client.tasks.spec import AgentChoice
from penstock.driver.v1 import agent_pb2
from penstock.redteam.attack import Attack, text_of
from penstock.trajectory.v1 import trajectory_pb2

_PLACE: Final = ".penstock-redteam"
_COMPILE_S: Final = 30.0
_FLAGS: Final = (
    "-O1", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-s", "-w",
    "-fno-builtin", "-Wl,-z,noseparate-code", "-Wl,--build-id=none",
)  # fmt: skip
_PROGRAM: Final = ("-static", "-fno-pie", "-no-pie")
_LIBRARY: Final = ("-shared", "-fPIC", "-Wl,-init,begin")


class NoCompiler(Exception):
    """This machine cannot compile an attack that is written in C."""


async def registered(ps: Penstock, spec: agent_pb2.AgentSpec) -> AgentChoice:
    """Registers an unlisted agent for the caller: deleted before this returns, addressed by its spec's hash."""
    agent = await ps.agents.register(spec)
    await ps.agents.delete(agent.name)
    return AgentChoice(name=agent.name, spec_sha256=agent.spec_sha256)


def spec_of(attack: Attack, *, own_kernel: bool = False) -> agent_pb2.AgentSpec:
    """Returns the spec of an attack's agent, for sandboxes with their own kernel or the machine's.

    Raises NoCompiler; takes as long as a compiler where the program is in C.
    """
    made = _spec_of(attack)
    made.files.add(path=f"{_PLACE}/kernel", text="own\n" if own_kernel else "shared\n")
    if attack.host_tool:
        made.mcp.CopyFrom(
            agent_pb2.McpConfig(path=f"{_PLACE}/mcp.json", key="servers", entry="{url: url, headers: headers}")
        )
    return made


def beside(attack: Attack) -> agent_pb2.AgentSpec:
    """Returns the spec of the agent in another sandbox."""
    assert attack.beside is not None
    return _python(f"{attack.name}-beside", f"Beside: {attack.tries}", attack.beside)


def _python(name: str, tries: str, program: str) -> agent_pb2.AgentSpec:
    start = "need python3\nexec python3 -I $place/attack.py\n"
    files = {"attack.py": text_of("programs/prelude.py.in") + program}
    return agent(name, tries, text_of("programs/prelude.sh") + start, files)


def _spec_of(attack: Attack) -> agent_pb2.AgentSpec:
    prelude = text_of("programs/prelude.sh")
    if attack.sh is not None:
        return agent(attack.name, attack.tries, prelude + attack.sh)
    if attack.python is not None:
        return _python(attack.name, attack.tries, attack.python)
    assert attack.c is not None
    start = (
        '[ "$(uname -m)" = x86_64 ] || inapplicable "the program is for x86-64"\n'
        "need base64\nprogram=$PWD/.attack\nbase64 -d $place/attack.b64 >$program && chmod 755 $program\n"
    )
    encoded = base64.encodebytes(_compiled(attack.c, _LIBRARY if attack.library else _PROGRAM)).decode()
    return agent(attack.name, attack.tries, prelude + start + attack.then, {"attack.b64": encoded})


def agent(name: str, tries: str, script: str, files: dict[str, str] | None = None) -> agent_pb2.AgentSpec:
    """Returns an agent that runs a shell script, with further files in its home."""
    texts = {"start.sh": script, "endpoint": "{{base_url}}\n", "key": "{{api_key}}", **(files or {})}
    return agent_pb2.AgentSpec(
        name=f"redteam-{name}",
        description=tries,
        version="1",
        argv=["sh", "{{home}}/" + f"{_PLACE}/start.sh"],
        instruction=agent_pb2.InstructionDelivery(
            method=agent_pb2.InstructionDelivery.METHOD_FILE, path=f"{_PLACE}/instruction.md"
        ),
        files=[agent_pb2.ConfigFile(path=f"{_PLACE}/{path}", text=text) for path, text in texts.items()],
        dialects=[
            trajectory_pb2.DIALECT_CHAT_COMPLETIONS,
            trajectory_pb2.DIALECT_RESPONSES,
            trajectory_pb2.DIALECT_MESSAGES,
        ],
        events=agent_pb2.EventMapping(
            source=agent_pb2.EventMapping.SOURCE_STDOUT_LINES,
            rules=[
                agent_pb2.EventRule(
                    when="starts_with(line, 'REDTEAM ')",
                    kind=agent_pb2.AGENT_EVENT_KIND_OTHER,
                    fields={"line": "line"},
                ),
                agent_pb2.EventRule(when="line != `null`"),
            ],
        ),
    )


@functools.cache
def _compiled(source: str, kind: tuple[str, ...]) -> bytes:
    """Returns the compiled program; it needs no library and so no compiler in the image.

    Each is compiled once: an attack is run on several backends and in two gradings. Raises NoCompiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompiler("its program is in C and this machine has no compiler (cc)")
    with tempfile.TemporaryDirectory(prefix="penstock-redteam-") as folder:
        (Path(folder) / "freestanding.h").write_text(text_of("programs/freestanding.h"))
        entry = (
            ""
            if kind is _LIBRARY
            else '__asm__(".globl _start\\n_start:\\n mov %rsp, %rdi\\n and $-16, %rsp\\n call begin\\n");\n'
        )
        (Path(folder) / "attack.c").write_text(f'#include "freestanding.h"\n{entry}{source}')
        argv = [compiler, *_FLAGS, *kind, "-o", "attack", "attack.c"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
        if done.returncode != 0:
            raise NoCompiler(f"its program is in C and {compiler} does not compile it: {done.stderr.strip()[-500:]}")
        return (Path(folder) / "attack").read_bytes()
