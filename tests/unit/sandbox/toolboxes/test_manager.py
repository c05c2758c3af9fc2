"""Toolboxes: installed once, retried where that can help, whole or not there."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.support.waiting import eventually

from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from penstock_sandbox.backends.host import layers
from penstock_sandbox.domain.free_space import Free, Watermark
from penstock_sandbox.domain.model import Runtime, RuntimeKind, Toolbox, ToolboxFile, ToolboxSpec
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes, toolbox_hash
from penstock_sandbox.toolboxes.turns import Turn

Npm = Callable[..., Path]

# Stands in for npm, at its own interface: arguments, settings and exit code. It fails the given number of times.
NPM = """#!/bin/sh
if [ "$1" = config ]; then
    echo "globalconfig={folder}/machine"; echo "userconfig=$HOME/.npmrc"; echo "cafile={folder}/ca.pem"; exit 0
fi
cat "$npm_config_globalconfig" "$npm_config_userconfig" "$npm_config_cafile" >> {log} 2> /dev/null
echo "proxy $HTTPS_PROXY, registry $npm_config_registry, named $NAMED, home $HOME" >> {log}
echo run >> {log}
echo "npm warn this is only a warning"
echo "$TOKEN_OF_THE_SERVICE" >> {log}
if [ $(grep -c run {log}) -le {failures} ]; then echo '{message}'; exit 1; fi
mkdir -p node_modules/.bin && echo 'echo ran' > node_modules/.bin/tool && chmod 700 node_modules/.bin/tool
{links}
"""


@pytest.fixture
def npm(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> Npm:
    """Puts a stand-in first in PATH; answers how often it ran."""
    folder, log = reachable, reachable / "log"

    def install(
        failures: int, message: str = "npm error network timeout", links: Mapping[str, str | Path] | None = None
    ) -> Path:
        log.touch()
        log.chmod(0o666)
        made = "\n".join(f"ln -sfn {target} node_modules/.bin/{name}" for name, target in (links or {}).items())
        text = NPM.format(folder=folder, log=log, failures=failures, message=message, links=made)
        (folder / "npm").write_text(text)
        (folder / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("TOKEN_OF_THE_SERVICE", "sk-service")
        return log

    return install


def pauseless(pauses: list[float]) -> Installer:
    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    uid = 61235 if os.geteuid() == 0 else None
    return Installer(uid, lambda seconds: asyncio.ensure_future(pause(seconds)))


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def toolboxes(tmp_path: Path, pauses: list[float]) -> Toolboxes:
    made = Toolboxes(tmp_path / "toolboxes", pauseless(pauses))
    made.open()
    return made


async def install(
    toolboxes: Toolboxes, spec: ToolboxSpec, namespace: str = DEFAULT_NAMESPACE
) -> tuple[list[str], Toolbox]:
    lines, box = [], None
    async for event in toolboxes.prepare(spec, namespace):
        if isinstance(event, Toolbox):
            box = event
        else:
            lines.append(event)
    assert box is not None
    return lines, box


PACKAGES = ToolboxSpec("agent", npm_packages=("tool@1.0.0",))


@pytest.mark.requirement("R56")
async def test_a_transient_failure_is_retried_whatever_was_printed(
    npm: Npm, toolboxes: Toolboxes, pauses: list[float]
) -> None:
    log = npm(failures=2)
    lines, box = await install(toolboxes, PACKAGES)
    assert log.read_text().count("run") == 3 and pauses == [1.0, 2.0]
    assert any("only a warning" in line for line in lines)
    mounted = toolboxes.mounted(box.id)
    tool = mounted.source / "node_modules/.bin/tool"
    # Everybody may run it, and nobody but the service may change it.
    assert tool.stat().st_mode & 0o777 == 0o755 and tool.stat().st_uid == os.geteuid()
    assert mounted.path[:2] == ("/opt/penstock/toolboxes/agent/bin", "/opt/penstock/toolboxes/agent/node_modules/.bin")


@pytest.mark.requirement("R56")
async def test_a_package_that_does_not_exist_is_not_retried(
    npm: Npm, toolboxes: Toolboxes, pauses: list[float]
) -> None:
    log = npm(failures=9, message="npm error code E404")
    with pytest.raises(Unavailable) as caught:
        await install(toolboxes, PACKAGES)
    assert caught.value.reason == "INSTALL_FAILED" and "E404" in caught.value.message
    assert log.read_text().count("run") == 1 and pauses == []
    assert toolboxes.all() == []


@pytest.mark.requirement("R48", "R56")
@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("SELF_SIGNED_CERT_IN_CHAIN", "cafile"),
        ("UNABLE_TO_VERIFY_LEAF_SIGNATURE", "cafile"),
        ("ETARGET", "version"),
        ("E404", "registry"),
        ("EBADENGINE", "Node.js"),
    ],
)
async def test_permanent_failure_is_not_retried_and_gives_advice(
    npm: Npm, toolboxes: Toolboxes, pauses: list[float], code: str, advice: str
) -> None:
    log = npm(failures=9, message=f"npm error code {code}\nnpm error errno {code}\nnpm error the cause\nnpm error more")
    with pytest.raises(Unavailable) as caught:
        await install(toolboxes, PACKAGES)
    assert log.read_text().count("run") == 1 and pauses == []
    assert f"({code}): the cause;" in caught.value.message and advice in caught.value.message
    assert caught.value.metadata["permanent"] == "true"


@pytest.mark.requirement("R56")
async def test_each_failed_attempt_shows_the_installers_message(npm: Npm, toolboxes: Toolboxes) -> None:
    npm(failures=2, message="npm error code ECONNRESET\nnpm error network https://me:hunter2@host/ reset")
    lines, _ = await install(toolboxes, PACKAGES)
    failed = [line for line in lines if line.startswith("npm install failed")]
    assert failed == [
        f"npm install failed (ECONNRESET): network https://***@host/ reset; again in {pause} s" for pause in (1, 2)
    ]
    assert "hunter2" not in "".join(lines)


@pytest.mark.requirement("R48")
async def test_installer_has_the_machines_and_the_users_npm_settings(
    npm: Npm, toolboxes: Toolboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the installer's own home and user are, and although its prefix is not the machine's."""
    log = npm(failures=0)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (log.parent / "machine").write_text("settings of the machine\n")
    (log.parent / "ca.pem").write_text("a certificate\n")
    (home / ".npmrc").write_text("settings of the user ${NAMED} ${PENSTOCK_SANDBOX_TOKENS}\n")
    (home / ".npmrc").chmod(0o600)
    for name, value in {
        "HOME": str(home),
        "HTTPS_PROXY": "http://proxy",
        "NPM_CONFIG_PREFIX": "/elsewhere",
        "npm_config_registry": "https://registry",
        "NAMED": "by the settings",
        "PENSTOCK_SANDBOX_TOKENS": "sk-penstock",
    }.items():
        monkeypatch.setenv(name, value)
    lines, _ = await install(toolboxes, PACKAGES)
    seen = log.read_text()
    for expected in ("of the machine", "of the user", "a certificate", "proxy http://proxy", "registry https://regi"):
        assert expected in seen
    assert "named by the settings" in seen and f"home {home}" not in seen and "sk-penstock" not in seen
    assert not any("settings of" in line for line in lines)


@pytest.mark.requirement("R12")
async def test_the_installer_sees_none_of_the_services_variables(npm: Npm, toolboxes: Toolboxes) -> None:
    log = npm(failures=0)
    await install(toolboxes, PACKAGES)
    assert "sk-service" not in log.read_text()


@pytest.mark.requirement("R57")
async def test_callers_share_one_installation_and_later_ones_find_it(
    npm: Npm, toolboxes: Toolboxes, tmp_path: Path, pauses: list[float]
) -> None:
    log = npm(failures=0)
    made = await asyncio.gather(*(install(toolboxes, PACKAGES) for _ in range(4)))
    assert len({box.id for _, box in made}) == 1
    assert log.read_text().count("run") == 1
    again = Toolboxes(tmp_path / "toolboxes", pauseless(pauses))
    again.open()
    assert [box.id for box in again.all()] == [made[0][1].id]
    assert (await install(again, PACKAGES))[1].id == made[0][1].id
    assert log.read_text().count("run") == 1


@pytest.mark.requirement("R50")
async def test_an_interrupted_installation_is_removed_at_the_next_start(tmp_path: Path, pauses: list[float]) -> None:
    (tmp_path / "toolboxes" / "partial-1" / "content").mkdir(parents=True)
    made = Toolboxes(tmp_path / "toolboxes", pauseless(pauses))
    made.open()
    assert list((tmp_path / "toolboxes").iterdir()) == []


@pytest.mark.requirement("R44")
async def test_files_are_put_in_place_with_their_modes(toolboxes: Toolboxes) -> None:
    spec = ToolboxSpec(
        "files",
        runtimes=(Runtime(RuntimeKind.PYTHON, "3.9"),),
        files=(ToolboxFile("bin/run", b"#!/bin/sh\n"), ToolboxFile("lib/data", b"x"), ToolboxFile("k", b"", 0o600)),
    )
    lines, box = await install(toolboxes, spec)
    source = toolboxes.mounted(box.id).source
    modes = {path: (source / path).stat().st_mode & 0o777 for path in ("bin/run", "lib/data", "k")}
    assert modes == {"bin/run": 0o755, "lib/data": 0o644, "k": 0o600}
    assert lines[0].startswith("python 3.")


@pytest.mark.requirement("R44")
async def test_a_file_replaces_a_packages_link_and_the_last_of_a_name_is_kept(
    npm: Npm, toolboxes: Toolboxes, tmp_path: Path
) -> None:
    """What a link leads to is left alone, in the toolbox and outside."""
    (tmp_path / "outside").write_text("outside")
    npm(failures=0, links={"tool": tmp_path / "outside", "other": "tool"})
    named = [("tool", b"first"), ("./tool", b"mine"), ("other", b"other"), ("new/sub/x", b"x")]
    files = tuple(ToolboxFile(f"node_modules/.bin/{name}", content) for name, content in named)
    _, box = await install(toolboxes, ToolboxSpec("agent", npm_packages=("tool@1.0.0",), files=files))
    programs = toolboxes.mounted(box.id).source / "node_modules/.bin"
    assert [(programs / name).read_bytes() for name in ("tool", "other", "new/sub/x")] == [b"mine", b"other", b"x"]
    assert not (programs / "tool").is_symlink() and (tmp_path / "outside").read_text() == "outside"


@pytest.mark.requirement("R44", "R64", "R90")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("node_modules/linked/x", "linked is a symbolic link"),
        ("node_modules/linked/sub/x", "linked is a symbolic link"),
        ("node_modules/.bin", ".bin is a directory"),
        ("node_modules/.bin/tool/x", "Not a directory"),
        ("n" * 256, "File name too long"),
        ("./.", "does not end in a name"),
    ],
)
async def test_a_file_that_packages_leave_no_place_for_is_refused_by_field(
    npm: Npm, toolboxes: Toolboxes, tmp_path: Path, path: str, reason: str
) -> None:
    """Nothing is written outside of the toolbox, whatever links its packages bring, and nothing of it is left."""
    outside = tmp_path / "outside"
    outside.mkdir()
    npm(failures=0, links={"../linked": outside})
    files = (ToolboxFile("bin/x", b""), ToolboxFile(path, b"x", 0o755))
    with pytest.raises(InvalidArgument) as caught:
        await install(toolboxes, ToolboxSpec("agent", npm_packages=("tool@1.0.0",), files=files))
    (violation,) = caught.value.violations
    assert violation.field == "spec.files[1].path" and reason in violation.description
    assert not any(outside.iterdir()) and not any((tmp_path / "toolboxes").iterdir())


@pytest.mark.requirement("R70")
async def test_a_toolbox_in_use_stays(toolboxes: Toolboxes) -> None:
    _, box = await install(toolboxes, ToolboxSpec("used", files=(ToolboxFile("a", b"x"),)))
    toolboxes.hold([box.id])
    with pytest.raises(FailedPrecondition):
        await toolboxes.delete(box.id)
    toolboxes.release([box.id])
    for _ in range(2):
        await toolboxes.delete(box.id)
    with pytest.raises(NotFound):
        toolboxes.mounted(box.id)


@pytest.mark.requirement("R48")
async def test_a_runtime_that_is_not_there_is_named_with_what_to_install(toolboxes: Toolboxes) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await install(toolboxes, ToolboxSpec("old", runtimes=(Runtime(RuntimeKind.NODE, "99.0"),)))
    assert caught.value.reason == "RUNTIME_MISSING" and "install" in caught.value.message


@pytest.mark.requirement("R42", "R64")
@pytest.mark.parametrize(
    "spec",
    [
        ToolboxSpec("Bad Name"),
        ToolboxSpec("../x"),
        ToolboxSpec("x", npm_packages=("tool",)),
        ToolboxSpec("x", npm_packages=("tool@latest",)),
        ToolboxSpec("x", npm_packages=("--flag@1",)),
        ToolboxSpec("x", npm_packages=("https://example.com/x.tgz@1",)),
        ToolboxSpec("x", files=(ToolboxFile("../escape", b""),)),
        ToolboxSpec("x", files=(ToolboxFile("/absolute", b""),)),
        ToolboxSpec("x", files=(ToolboxFile("debian/usr/bin/x", b""),)),
        ToolboxSpec("x", files=(ToolboxFile("d/" * 2000 + "x", b""),)),
        ToolboxSpec("x", path_directories=("a:b",)),
    ],
)
async def test_a_malformed_spec_is_refused_by_field(toolboxes: Toolboxes, spec: ToolboxSpec) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await install(toolboxes, spec)
    assert caught.value.violations


@pytest.mark.requirement("R25")
def test_the_id_is_the_contents() -> None:
    one = ToolboxSpec("x", files=(ToolboxFile("bin/a", b"1"), ToolboxFile("b", b"2")))
    same = ToolboxSpec("x", files=(ToolboxFile("b", b"2"), ToolboxFile("bin/a", b"1", 0o755)))
    other = ToolboxSpec("x", files=(ToolboxFile("b", b"2"), ToolboxFile("bin/a", b"3")))
    assert toolbox_hash(one) == toolbox_hash(same) != toolbox_hash(other)


@pytest.mark.requirement("R48")
@pytest.mark.parametrize(
    "record", ["", "[]", '"x"', '{"name": "agent"}', b"\xff", '{"name": "a", "runtimes": [["node"]]}', "[" * 100_000]
)
async def test_toolbox_with_an_unreadable_record_is_made_anew(
    tmp_path: Path, pauses: list[float], record: str | bytes
) -> None:
    """Damaged, or of another version; the service comes up all the same."""
    spec = ToolboxSpec("agent", files=(ToolboxFile("bin/tool", b"echo"),))
    first = Toolboxes(tmp_path / "toolboxes", pauseless(pauses))
    first.open()
    _, kept = await install(first, ToolboxSpec("other", files=(ToolboxFile("bin/tool", b"echo"),)))
    _, broken = await install(first, spec)
    path = tmp_path / "toolboxes" / broken.id / "toolbox.json"
    path.write_bytes(record if isinstance(record, bytes) else record.encode())
    again = Toolboxes(tmp_path / "toolboxes", pauseless(pauses))
    again.open()
    assert [box.id for box in again.all()] == [kept.id]
    _, made = await install(again, spec)
    assert made.id == broken.id


class Held(Installer):
    """An installer that waits: those that began, and what lets one end."""

    def __init__(self) -> None:
        super().__init__(None)
        self.began: list[str] = []
        self.go_on = asyncio.Semaphore(0)

    async def npm(
        self, packages: Sequence[str], target: Path, report: Callable[[str], None], turn: Turn = nullcontext
    ) -> None:
        async with turn():
            self.began.append(packages[0])
            report("begun")
            await self.go_on.acquire()
            if packages[0].startswith("bad"):
                raise Unavailable("bad", reason="INSTALL_FAILED")
            (target / "node_modules").mkdir()


@pytest.mark.requirement("R26", "R51")
async def test_a_namespaces_installations_leave_a_turn_to_others(tmp_path: Path) -> None:
    installer = Held()
    toolboxes = Toolboxes(tmp_path / "toolboxes", installer)
    toolboxes.open()
    boxes = [ToolboxSpec(f"box{number}", npm_packages=(f"tool@{number}.0.0",)) for number in range(8)]
    making = [asyncio.create_task(install(toolboxes, spec, "greedy")) for spec in boxes[:6]]
    await eventually(lambda: len(installer.began) == 3, "as many have begun as one namespace may")
    making.append(asyncio.create_task(install(toolboxes, boxes[6], "other")))
    await eventually(lambda: len(installer.began) == 4, "another namespace's has begun")
    assert installer.began[3] == "tool@6.0.0"
    making.append(asyncio.create_task(install(toolboxes, boxes[7], "other")))
    await eventually(lambda: toolboxes._turns._queue.queued == 4, "all others wait")
    installer.go_on.release()
    await eventually(lambda: len(installer.began) == 5, "the next has begun")
    # Not one of the three that came before it.
    assert installer.began[4] == "tool@7.0.0"
    for _ in making:
        installer.go_on.release()
    await asyncio.gather(*making)


@pytest.mark.requirement("R26", "R56")
async def test_an_installation_that_waits_for_its_next_attempt_stops_no_other(
    npm: Npm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_sandbox.toolboxes.turns.AT_ONCE", 1)
    pausing, go_on = asyncio.Event(), asyncio.Event()

    async def pause(_: float) -> None:
        pausing.set()
        await go_on.wait()

    log = npm(failures=1)
    uid = 61235 if os.geteuid() == 0 else None
    toolboxes = Toolboxes(tmp_path / "toolboxes", Installer(uid, pause))
    toolboxes.open()
    first = asyncio.create_task(install(toolboxes, PACKAGES))
    async with asyncio.timeout(60):
        await pausing.wait()
        lines, _ = await install(toolboxes, ToolboxSpec("other", npm_packages=("tool@1.0.0",)))
    assert not any("waits for its turn" in line for line in lines)
    go_on.set()
    await first
    assert log.read_text().count("run") == 3


@pytest.mark.requirement("R26", "R57")
async def test_few_installations_run_at_once_and_the_others_say_that_they_wait(tmp_path: Path) -> None:
    """In the order in which they came; a toolbox without packages does not wait."""
    installer = Held()
    toolboxes = Toolboxes(tmp_path / "toolboxes", installer)
    toolboxes.open()
    specs = [ToolboxSpec(f"box{number}", npm_packages=(f"tool@{number}.0.0",)) for number in range(6)]
    making = [asyncio.create_task(install(toolboxes, spec)) for spec in specs]
    await eventually(lambda: len(installer.began) == 3, "the first have begun")
    await install(toolboxes, ToolboxSpec("files", files=(ToolboxFile("a", b"x"),)))
    assert len(installer.began) == 3
    for begun in (4, 5, 6):
        installer.go_on.release()
        await eventually(lambda begun=begun: len(installer.began) == begun, "the next has begun")  # type: ignore[misc]
    for _ in range(3):
        installer.go_on.release()
    waited = ["other toolboxes are being installed: this one waits for its turn", "begun"]
    assert [lines for lines, _ in await asyncio.gather(*making)] == [["begun"]] * 3 + [waited] * 3


@pytest.mark.requirement("R26")
async def test_a_turn_comes_free_with_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_sandbox.toolboxes.turns.AT_ONCE", 1)
    installer = Held()
    toolboxes = Toolboxes(tmp_path / "toolboxes", installer)
    toolboxes.open()
    for _ in range(2):
        installer.go_on.release()
        with pytest.raises(Unavailable):
            await install(toolboxes, ToolboxSpec("agent", npm_packages=("bad@1.0.0",)))
    installer.go_on.release()
    await install(toolboxes, PACKAGES)


@pytest.mark.requirement("R95")
async def test_an_installation_is_refused_or_stopped_when_the_disk_is_low(tmp_path: Path) -> None:
    """Nothing of it is left; otherwise others' sandboxes would be ended for the space that it takes."""
    free, looks = 99, asyncio.Event()

    async def pause(_: float) -> None:
        await looks.wait()

    installer = Held()
    space = Watermark(tmp_path, 100, free=lambda _: Free(free, None), pause=pause)
    toolboxes = Toolboxes(tmp_path / "toolboxes", installer, space=space)
    toolboxes.open()
    with pytest.raises(ResourceExhausted, match="99 bytes left") as refused:
        await install(toolboxes, PACKAGES)
    assert refused.value.reason == "DISK_LOW" and not installer.began
    free = 100
    making = asyncio.create_task(install(toolboxes, PACKAGES))
    await eventually(lambda: bool(installer.began), "it has begun")
    free = 98
    looks.set()
    with pytest.raises(ResourceExhausted, match="98 bytes left"):
        await making
    assert not any((tmp_path / "toolboxes").iterdir())
    free = 100
    looks.clear()
    installer.go_on.release()
    await install(toolboxes, PACKAGES)


@pytest.mark.requirement("R95")
async def test_packages_from_another_disk_are_copied_only_where_they_leave_the_minimum(
    npm: Npm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installer's own disk is not the one that is watched."""
    rename = os.rename

    def across(source: str | Path, target: str | Path) -> None:
        if Path(source).name == "node_modules":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", across)
    npm(failures=0)
    free = 105
    space = Watermark(tmp_path, 100, free=lambda _: Free(free, None))
    uid = 61235 if os.geteuid() == 0 else None
    toolboxes = Toolboxes(tmp_path / "toolboxes", Installer(uid), space=space)
    toolboxes.open()
    with pytest.raises(ResourceExhausted, match="beside the 9 that this takes") as refused:
        await install(toolboxes, PACKAGES)
    assert refused.value.reason == "DISK_LOW" and not any((tmp_path / "toolboxes").iterdir())
    free = 109
    _, box = await install(toolboxes, PACKAGES)
    tool = toolboxes.mounted(box.id).source / "node_modules/.bin/tool"
    assert (tool.read_text(), tool.stat().st_mode & 0o777) == ("echo ran\n", 0o755)


@pytest.mark.requirement("R67", "R95")
async def test_what_a_failed_installation_leaves_is_removed_beside_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    remove = layers.remove

    def removed(folder: Path) -> None:
        threads.append(threading.current_thread())
        remove(folder)

    monkeypatch.setattr(layers, "remove", removed)
    installer = Held()
    toolboxes = Toolboxes(tmp_path / "toolboxes", installer)
    toolboxes.open()
    installer.go_on.release()
    with pytest.raises(Unavailable):
        await install(toolboxes, ToolboxSpec("agent", npm_packages=("bad@1.0.0",)))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    assert not any((tmp_path / "toolboxes").iterdir())


@pytest.mark.requirement("R95", "R151")
async def test_unused_toolboxes_give_way_when_the_disk_is_low(tmp_path: Path) -> None:
    """But none that a sandbox has, and none of the last ones, which a sandbox may be about to get."""
    folder = tmp_path / "toolboxes"
    space = Watermark(tmp_path, 80, free=lambda _: Free(100 - len(list(folder.glob("*/toolbox.json"))), None))
    toolboxes = Toolboxes(folder, Held(), space=space)
    toolboxes.open()
    specs = [ToolboxSpec(f"box{number}", files=(ToolboxFile("a", b"x"),)) for number in range(22)]
    _, first = await install(toolboxes, specs[0])
    toolboxes.hold([first.id])
    for spec in specs[1:]:
        await install(toolboxes, spec)
    left = {box.name for box in toolboxes.all()}
    assert "box0" in left and "box1" not in left and {f"box{number}" for number in range(6, 22)} <= left
