"""Parts of the local backend that need no sandbox."""

from __future__ import annotations

import asyncio
import os
import tarfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import GUARD_S

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from penstock_sandbox.app import local_backend
from penstock_sandbox.backends.host import cgroups, layers
from penstock_sandbox.backends.local import rootfs
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.disk.limits import Allotment
from penstock_sandbox.backends.local.disk.usage import AT_ONCE, DiskUse, Use, measure
from penstock_sandbox.backends.local.host_users import UserPool
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.stage import Stage
from penstock_sandbox.domain.model import (
    NetworkKind,
    NetworkPolicy,
    Resources,
    Runtime,
    RuntimeKind,
    SandboxSpec,
)
from penstock_sandbox.guest.common import walk
from penstock_sandbox.rpc.convert import page
from penstock_sandbox.sandboxes.policy import network_problems
from penstock_sandbox.settings import SandboxSettings
from penstock_sandbox.toolboxes import runtimes


@pytest.mark.requirement("R52")
def test_users_are_handed_out_once_and_come_back_with_their_last_holder() -> None:
    pool = UserPool(1000, 2)
    first, second = pool.acquire(), pool.acquire()
    assert {first, second} == {1000, 1001}
    with pytest.raises(ResourceExhausted):
        pool.acquire()
    pool.share(first)
    pool.release(first)
    with pytest.raises(ResourceExhausted):
        pool.acquire()
    pool.release(first)
    assert pool.acquire() == first


@pytest.mark.requirement("R45")
def test_an_ordinary_user_has_no_users_to_hand_out() -> None:
    pool = UserPool(None, 0)
    assert pool.acquire() is None
    pool.release(None)


@pytest.mark.requirement("R12")
def test_a_stage_shows_only_what_lies_under_its_sources() -> None:
    stage = Stage(Path("/mnt"), {"state": Path("/root/x"), "extra": Path("/srv/y")})
    assert stage.map("/root/x/layers/a") == "/mnt/state/layers/a"
    assert stage.map(Path("/srv/y")) == "/mnt/extra"
    assert stage.map("/usr") == "/usr"
    assert Stage(None).map("/root/x") == "/root/x"


@pytest.mark.requirement("R12")
def test_the_skeleton_has_our_accounts_and_nothing_of_the_hosts(tmp_path: Path) -> None:
    rootfs.write_skeleton(tmp_path / "base", rootfs.host_binds(()))
    base = tmp_path / "base"
    assert (base / "etc/passwd").read_text().count("\n") == 3
    assert not (base / "etc/shadow").exists() and not (base / "etc/environment").exists()
    assert (base / "etc/resolv.conf").read_text() == ""
    assert not list((base / "home").iterdir() if (base / "home").exists() else [])


@pytest.mark.requirement("R75")
def test_a_diff_follows_no_link_and_reads_no_fifo(tmp_path: Path) -> None:
    """The layer belongs to the agent, and the service may be root."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "dir").symlink_to(tmp_path / "outside")
    (upper / "file").symlink_to(tmp_path / "outside" / "secret")
    os.mkfifo(upper / "fifo")
    (upper / "real").write_bytes(b"x" * 600_000)
    pieces = list(layers.diff(upper))
    assert pieces[-1] == []
    chunks = [piece for piece in pieces if isinstance(piece, bytes)]
    assert max(map(len, chunks)) <= 256 * 1024
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"".join(chunks))
    assert b"secret" not in archive.read_bytes().replace(b"outside/secret", b"")
    with tarfile.open(archive) as opened:
        assert sorted(opened.getnames()) == ["dir", "fifo", "file", "real"]
        assert opened.getmember("fifo").isfifo()


@pytest.mark.requirement("R50")
def test_removing_a_tree_gets_past_directories_without_permissions(tmp_path: Path) -> None:
    inner = tmp_path / "tree" / "work"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (tmp_path / "keep").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "keep")
    inner.chmod(0)
    layers.remove(tmp_path / "tree")
    assert [child.name for child in tmp_path.iterdir()] == ["keep"]


def deep(folder: Path, depth: int) -> None:
    """What `mkdir d; cd d` makes, `depth` times, with a file at the end."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


@pytest.mark.requirement("R26", "R75")
def test_tree_of_any_depth_is_listed_measured_and_removed(tmp_path: Path) -> None:
    """An agent makes one with a line of shell; nothing of the service recurses, or opens it all at once."""
    (tmp_path / "upper").mkdir()
    deep(tmp_path / "upper", 3000)
    (tmp_path / "upper" / "after").write_bytes(b"x" * 7)
    assert layers.size(tmp_path / "upper") == 7
    *chunks, deleted = layers.diff(tmp_path / "upper")
    archive = tmp_path / "a.tar"
    archive.write_bytes(b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))
    with tarfile.open(archive) as opened:
        names = {member.name for member in opened}
    assert (len(names), deleted) == (3002, [])
    assert {"after", "/".join(["d"] * 3000) + "/file"} <= names
    archive.unlink()
    layers.remove(tmp_path / "upper")
    assert not list(tmp_path.iterdir())


@pytest.mark.requirement("R26", "R71")
async def test_sandbox_is_measured_once_at_a_time_for_many_watchers(tmp_path: Path) -> None:
    """Those who give up leave no second measurement behind, nor a thread that others need."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    measured: list[Path] = []

    def slowly(upper: Path, first_pid: int, most: int) -> Use:
        measured.append(upper)
        begun.release()
        go_on.wait(GUARD_S)
        return measure(upper, first_pid, most)

    (tmp_path / "file").write_bytes(b"x" * 7)
    others = [tmp_path / str(number) for number in range(40)]
    use = DiskUse(slowly)
    watchers = [asyncio.create_task(use.of(tmp_path)) for _ in range(100)]
    await asyncio.to_thread(begun.acquire)
    for watcher in watchers[1:]:
        watcher.cancel()
    await asyncio.wait(watchers[1:])
    late = asyncio.create_task(use.of(tmp_path))
    more = [asyncio.create_task(use.of(other)) for other in others]
    for _ in range(AT_ONCE - 1):
        await asyncio.to_thread(begun.acquire)
    # As many as may be are under way, and they hold nobody else up.
    assert await asyncio.to_thread(len, measured) == AT_ONCE
    go_on.set()
    held = measure(tmp_path)
    assert held.inodes == 1 and held.bytes > 0
    assert (await watchers[0], await late) == (held, held)
    assert await asyncio.gather(*more) == [Use()] * len(others)
    assert sorted(measured) == sorted([tmp_path, *others])
    assert await use.of(tmp_path) == held
    use.close()


@pytest.mark.requirement("R26", "R71")
async def test_sandbox_too_large_to_measure_is_shown_without_its_disk(tmp_path: Path) -> None:
    """Many files, one directory full of them, or a path without end: measuring ends; unset = cannot tell."""
    upper, chain = tmp_path / "upper", tmp_path / "chain"
    for number in range(3):
        (upper / str(number)).mkdir(parents=True)
        (upper / str(number) / "file").write_bytes(b"x")
    assert (await DiskUse(most_entries=6).of(upper) or Use()).inodes == 6
    assert await DiskUse(most_entries=5).of(upper) is None
    chain.mkdir()
    deep(chain, 600)
    # 601 names, and the directories' paths: 2, 4, ... characters.
    paths = sum(2 * depth // 256 for depth in range(601))
    assert (await DiskUse(most_entries=601 + paths).of(chain) or Use()).inodes == 601
    assert await DiskUse(most_entries=600 + paths).of(chain) is None

    async def release(_: LocalSandbox) -> None:
        return None

    sandbox = LocalSandbox(
        "s", None, upper, None, {}, lambda _: None, release, Allotment(upper, DiskUse(most_entries=5))
    )
    assert (await sandbox.stats()).disk_bytes is None


@pytest.mark.requirement("R75")
def test_a_directory_that_is_moved_while_it_is_walked_leads_nowhere_else(tmp_path: Path) -> None:
    """The way up from it is another one now, and a tree outside of what is walked is never looked at."""
    top = tmp_path / "in" / "upper"
    (top / "a" / "b" / "c").mkdir(parents=True)
    (top / "z").mkdir()
    (tmp_path / "secret").mkdir()
    (top / "a" / "b" / "c" / "deepest").touch()
    seen = []
    for path, name, _, _ in walk.walk(str(top)):
        seen.append(f"{path}/{name}")
        if name == "deepest":
            (top / "a" / "b" / "c").rename(tmp_path / "c")
            (top / "a" / "b").rename(tmp_path / "b")
    assert sorted(seen[:2]) == ["/a", "/z"]
    assert seen[2:] == ["/a/b", "/a/b/c", "/a/b/c/deepest"]


@pytest.mark.requirement("R48")
def test_a_runtime_that_is_too_old_is_not_found() -> None:
    assert runtimes.find(Runtime(RuntimeKind.PYTHON, "3.9")) is not None
    assert runtimes.find(Runtime(RuntimeKind.PYTHON, "99")) is None


@pytest.mark.requirement("R26")
@given(count=st.integers(0, 30), size=st.integers(1, 7), gone=st.sets(st.integers(0, 29)))
def test_pages_tell_everything_once_even_when_items_vanish_in_between(count: int, size: int, gone: set[int]) -> None:
    items = sorted(((index / 3, f"id{index}") for index in range(count)), reverse=True)
    seen: list[tuple[float, str]] = []
    token = ""
    left = items
    while True:
        shown, token = page(left, lambda item: item, size, token)
        seen += shown
        if not token:
            break
        left = [item for item in left if item in seen or items.index(item) not in gone]
    assert len(set(seen)) == len(seen)
    assert {item for index, item in enumerate(items) if index not in gone} <= set(seen)


@pytest.mark.requirement("R64")
@pytest.mark.parametrize(
    ("port", "upstream", "fields"),
    [
        (4000, "127.0.0.1:7780", []),
        (4000, "[::1]:7780", []),
        (4000, "unix:/run/x.sock", []),
        (1023, "h:1", ["local_port"]),
        (65536, "h:1", ["local_port"]),
        (4000, "h", ["upstream"]),
        (4000, ":80", ["upstream"]),
        (4000, "h:0", ["upstream"]),
        (4000, "h:٣", ["upstream"]),
        (4000, "unix:relative", ["upstream"]),
    ],
)
def test_a_policys_form_is_checked_before_the_operators_list(port: int, upstream: str, fields: list[str]) -> None:
    found = network_problems(NetworkPolicy(NetworkKind.ONE_ENDPOINT, port, upstream))
    assert [problem.field.rpartition(".")[2] for problem in found] == fields


@pytest.mark.requirement("R55")
def test_more_memory_than_the_machine_has_is_no_limit_and_so_refused() -> None:
    cgroups.refuse_beyond_machine(Resources(memory_bytes=64 << 20))
    cgroups.refuse_beyond_machine(Resources())
    with pytest.raises(InvalidArgument, match="than this machine's") as caught:
        cgroups.refuse_beyond_machine(Resources(memory_bytes=10**15))
    assert caught.value.reason == "FIELD_INVALID"


@pytest.mark.requirement("R50")
def test_unremovable_leftovers_do_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are removed, and the next start tries again."""
    for name in ("a", "b"):
        (tmp_path / "trash" / name).mkdir(parents=True)
    remove = layers.remove

    def refuse(folder: Path) -> None:
        if folder.name == "a":
            raise PermissionError("busy")
        remove(folder)

    monkeypatch.setattr(layers, "remove", refuse)
    LocalBackend(LocalOptions(tmp_path))._clean()
    assert [child.name for child in (tmp_path / "trash").iterdir()] == ["a"]


@pytest.mark.requirement("R54", "R142")
@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "169.254.169.254", "[::1]:{port}", "a.example", "ghcr.io:{port}"]
)
async def test_no_host_but_the_operators_registries_is_asked_for_an_image(tmp_path: Path, host: str) -> None:
    """One that callers name could lead the service to any address of its network, and get what that answers."""
    asked = 0

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    backend = local_backend(SandboxSettings(state_dir=tmp_path, anonymous=True))
    async with await asyncio.start_server(answer, "localhost", 0) as server:
        name = f"{host.format(port=server.sockets[0].getsockname()[1])}/x"
        with pytest.raises(FailedPrecondition, match="local_registries does not name") as refused:
            await backend.fetch(SandboxSpec(image=name))
    assert refused.value.reason == "IMAGE_NOT_ALLOWED" and asked == 0
