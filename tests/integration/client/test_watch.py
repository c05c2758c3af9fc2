"""`penstock watch` as a person sees it, at a terminal, and as a program reads it."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from tests.integration.client.conftest import TASK
from tests.integration.client.test_cli import start
from tests.support.endpoints.loopback import unused_port
from tests.support.terminal import ptys
from tests.support.terminal.commands import invoke

from penstock.client import Command, Mode, Penstock, SeedFile
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = b"\x1b]0;PWNED\x07\x1b[2J\xc2\x9b31m \xe2\x80\xae desrever [bold]x[/bold] <script>the word\r\n"


@pytest.fixture
def connection(stack: LocalStack, tmp_path: Path) -> dict[str, str]:
    """An environment in which the command line finds the stack of the tests."""
    write_connection(tmp_path / "connection.json", stack.endpoints, pid=os.getpid())
    return {"PENSTOCK_CONNECTION": str(tmp_path / "connection.json")}


async def group_of(ps: Penstock, n: int, run_id: str, group_id: str) -> str:
    """A group that has ended."""
    task = replace(TASK, files=[SeedFile("note.txt", HOSTILE)])
    handle = await ps.groups.create(
        task, "shell", n, run_id=run_id, group_id=group_id, mode=Mode.TRANSPARENT_PROXY, labels={"set": run_id}
    )
    await handle.wait()
    return handle.group_id


class Door:
    """A port that leads to an address while it is open; closed, what it carried is cut."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._to = int(port)
        self._server: asyncio.Server | None = None
        self._carrying: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.port = unused_port()

    async def open(self) -> None:
        """Lets through from now on, always at the same port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        """Cuts everything."""
        if self._server is not None:
            self._server.close()
        for writer in self._carrying.values():
            writer.transport.abort()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._to)
        for source, sink in ((reader, back), (there, writer)):
            self._carrying[asyncio.create_task(self._carry(source, sink))] = sink

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return  # one of the two was cut, which is what this is for
        finally:
            sink.close()


async def test_a_person_sees_rollouts_begin_and_end_and_their_rewards(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """A live table of rollouts and groups with the reward's curve and spread; nothing that an agent wrote
    reaches the terminal as a command."""
    async with ptys.penstock("watch", "--run", "seen", environment=connection, cwd=tmp_path) as terminal:
        await terminal.shows("run seen", "live", "no rollout yet")
        await group_of(ps, 2, "seen", "seen-a")
        await terminal.shows("2 rollouts", "2/2", "seen-a-0", "seen-a-1", "completed", "0.75")
        await group_of(ps, 1, "seen", "seen-b")
        shown = await terminal.shows("3 rollouts", "reward 0.750", "2 groups in the order", "seen-b-0")
        assert "4 calls" in shown or "6 calls" in shown
        terminal.press(b"\t")
        await terminal.until(lambda text: "seen-b-0" in text and "mean" not in text.splitlines()[10:], "rollouts only")
        terminal.press(b"\t")
        await terminal.until(lambda text: "seen-b-0" not in text and "1/1" in text, "groups only")
        terminal.resize(60, 16)
        await terminal.until(lambda text: "groups in the order" not in text and "1/1" in text, "no room for the curve")
        terminal.press(b"q")
        assert await terminal.ends() == 0
        assert not terminal.foreign and terminal.title != "PWNED"


async def test_watch_shows_a_broken_connection_and_resumes(
    connection: dict[str, str], stack: LocalStack, ps: Penstock, tmp_path: Path
) -> None:
    """A dead service and a wrong token are said in words, and it recovers by itself."""
    await group_of(ps, 1, "broken", "broken")
    file, door = tmp_path / "connection.json", Door(stack.endpoints.driver)
    await door.open()
    through = replace(stack.endpoints, driver=f"127.0.0.1:{door.port}")
    write_connection(file, through, pid=os.getpid())
    try:
        async with ptys.penstock("watch", "--run", "broken", environment=connection, cwd=tmp_path) as terminal:
            await terminal.shows("live", f"127.0.0.1:{door.port}", "completed")
            # Before it looks again: an attempt with the first token would come through an open door.
            write_connection(file, replace(through, token="0" * 64), pid=os.getpid())
            await door.close()
            shown = await terminal.shows("waiting", f"Cannot reach the driver service at 127.0.0.1:{door.port}")
            assert "completed" in shown, "what was known stays"
            await door.open()
            await terminal.shows("waiting", "the token is invalid")
            await group_of(ps, 1, "broken", "broken-2")
            write_connection(file, through, pid=os.getpid())
            await terminal.shows("live", "broken-2-0", "2 rollouts")
            terminal.press(b"\x03")
            assert await terminal.ends() == 130
    finally:
        await door.close()


async def test_lines_are_printed_for_each_change_until_the_group_ends(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """Standard output is JSON and nothing else, and the last line of a rollout is how it ended."""
    watching = await start("watch", "--group", "lines", "--json", environment=connection, cwd=tmp_path)
    await group_of(ps, 2, "lines", "lines")
    out, err = await watching.communicate()
    assert watching.returncode == 0, err
    lines = [orjson.loads(line) for line in out.splitlines()]
    last = {line["rollout_id"]: line for line in lines}
    assert [last[name]["reward"]["value"] for name in ("lines-0", "lines-1")] == [0.75, 0.75]
    assert all(line["phase"] == "ended" and line["calls"] == 2 for line in last.values())


async def test_lines_report_a_failed_rollout_of_the_group(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """Exit code 1, as for every command: done, and a rollout failed."""
    task = replace(TASK, setup=[Command(["false"])])
    await (await ps.groups.create(task, "shell", 1, group_id="fails", mode=Mode.TRANSPARENT_PROXY)).wait()
    watching = ("watch", "--group", "fails", "--json")
    code, out, err = await asyncio.to_thread(invoke, *watching, environment=connection, cwd=tmp_path)
    assert code == 1 and orjson.loads(out.splitlines()[-1])["failure"], (out, err)


async def test_a_program_does_not_wait_for_services_that_never_answered(
    connection: dict[str, str], stack: LocalStack, tmp_path: Path
) -> None:
    """Before the first answer exit code 3 is that nobody is there, 4 that the token is refused."""
    nobody, refused = replace(stack.endpoints, driver="127.0.0.1:1"), replace(stack.endpoints, token="0" * 64)
    for endpoints, code in (nobody, 3), (refused, 4):
        write_connection(tmp_path / "connection.json", endpoints, pid=os.getpid())
        for argv in (("watch", "--json"), ("watch", "--group", "any")):
            found, out, err = await asyncio.to_thread(invoke, *argv, environment=connection, cwd=tmp_path)
            assert (found, out) == (code, ""), err
    nowhere = ("watch", "--json", "--state-dir", str(tmp_path / "none"))
    found, _, err = await asyncio.to_thread(invoke, *nowhere, environment=connection, cwd=tmp_path)
    assert found == 3 and "penstock up" in err


async def look(*argv: str, environment: dict[str, str], cwd: Path) -> tuple[int, str, str]:
    """`penstock watch --once`."""
    return await asyncio.to_thread(invoke, "watch", "--once", *argv, environment=environment, cwd=cwd)


async def test_a_look_says_how_they_stand_or_that_there_are_none(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """--once is for scripts: exit code 1 where nothing matches, 3 where nobody answers, and it waits for nobody."""
    await group_of(ps, 2, "look", "look")
    code, out, err = await asyncio.to_thread(
        invoke, "watch", "--once", "--label", "set=look", environment=connection, cwd=tmp_path
    )
    assert code == 0 and "2 rollouts" in out and "look-1" in out and "2/2" in out, (out, err)
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    code, out, err = await asyncio.to_thread(
        invoke, "watch", "--once", "--run", "typo", environment=connection, cwd=tmp_path
    )
    assert code == 1 and not out and "no rollout: run typo" in err
    code, _, err = await asyncio.to_thread(
        invoke, "watch", "--once", "--state-dir", str(tmp_path / "none"), environment=connection, cwd=tmp_path
    )
    assert code == 3 and "penstock up" in err


async def test_a_limit_leaves_groups_whole_and_says_what_it_leaves_out(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """with --ended 1 a group of two has both, in words and in JSON, and the older group is counted."""
    for name in ("cut-a", "cut-b"):
        await group_of(ps, 2, "cut", name)
    code, out, err = await look("--run", "cut", "--ended", "1", environment=connection, cwd=tmp_path)
    assert code == 0 and "2/2" in out and "cut-b" in out and "cut-a" not in out, (out, err)
    assert "2 older rollouts not shown" in out and "2 older rollouts not shown" in err
    code, out, err = await look("--run", "cut", "--ended", "1", "--json", environment=connection, cwd=tmp_path)
    assert sorted(orjson.loads(line)["rollout_id"] for line in out.splitlines()) == ["cut-b-0", "cut-b-1"]
    assert "2 older rollouts not shown" in err
    code, out, err = await look("--run", "cut", environment=connection, cwd=tmp_path)
    assert "4 rollouts" in out and "not shown" not in out + err


async def test_waiting_for_an_absent_group_is_announced(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """A typo does not look like a long wait; a group that is created afterwards is watched to its end."""
    watching = await start("watch", "--group", "later", environment=connection, cwd=tmp_path)
    assert watching.stderr is not None
    said = await watching.stderr.readline()
    assert b"no rollout yet: group later; waiting for one to be created" in said
    await group_of(ps, 1, "later", "later")
    out, _ = await watching.communicate()
    assert watching.returncode == 0 and b"later-0: completed" in out
