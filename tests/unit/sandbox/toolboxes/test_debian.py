"""Debian packages of toolboxes: from a mirror on loopback, by their hashes, with nothing of them run."""

from __future__ import annotations

import asyncio
import io
import lzma
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import test_utils, web
from pydantic import ValidationError
from tests.support.endpoints.debian import line, package, path_of
from tests.support.endpoints.package_index import Index, index
from yarl import URL

from penstock.values.locks import debian_lock
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unavailable
from penstock_sandbox.backends.images import store
from penstock_sandbox.backends.images.store import unpacked
from penstock_sandbox.domain.model import Toolbox, ToolboxFile, ToolboxSpec
from penstock_sandbox.settings import SandboxSettings
from penstock_sandbox.toolboxes import debian_mirrors, debian_packages, debian_tree
from penstock_sandbox.toolboxes.debian_packages import DebianPackages
from penstock_sandbox.toolboxes.installer import Installer
from penstock_sandbox.toolboxes.manager import Toolboxes

UID = 61235 if os.geteuid() == 0 else None
HELLO = {"usr/bin/hello": "#!/bin/sh\ncat /usr/share/hello/text\n", "usr/share/hello/text": "hello\n"}


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with index() as served:
        yield served


def add(mirror: Index, name: str, content: bytes) -> str:
    """Puts a package on the mirror; returns its line."""
    mirror.files[f"/debian/{path_of(name)}"] = content
    return line(name, content)


def toolboxes(folder: Path, *mirrors: str, most: int = 10_000_000) -> Toolboxes:
    async def pause(_: float) -> None:
        pass

    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    made = Toolboxes(folder / "toolboxes", Installer(UID), debian=DebianPackages(mirrors, most, UID, pause=pause))
    made.open()
    return made


async def prepared(boxes: Toolboxes, lock: str) -> tuple[Toolbox, list[str]]:
    events = [event async for event in boxes.prepare(ToolboxSpec("task", debian_lock=lock))]
    return events[-1], [event for event in events if isinstance(event, str)]  # type: ignore[return-value]


async def refusal(boxes: Toolboxes, lock: str) -> Unavailable:
    with pytest.raises(Unavailable) as refused:
        await prepared(boxes, lock)
    assert refused.value.reason == "INSTALL_FAILED" and not any((boxes._folder).iterdir())
    return refused.value


@pytest.mark.requirement("R151")
async def test_files_are_taken_and_no_script_runs(tmp_path: Path, mirror: Index) -> None:
    """Where Debian has them since 12; neither set-user-id bits nor other places at the top level are taken."""
    mark = tmp_path / "ran"
    scripts = dict.fromkeys(("preinst", "postinst"), f"#!/bin/sh\ntouch {mark}\n")
    lines = add(mirror, "hello", package(tmp_path, "hello", HELLO, scripts=scripts))
    files = {"bin/old": "#!/bin/sh\n", "lib/old/x": "x", "srv/y": "y", "usr/lib/old/z": "z", "etc/old.conf": "c"}
    lines += add(mirror, "old", package(tmp_path, "old", files))
    boxes = toolboxes(tmp_path, f"{mirror.url}/debian")
    box, progress = await prepared(boxes, lines)
    layer = boxes.mounted(box.id).root_layer
    assert layer is not None and sorted(child.name for child in layer.iterdir()) == ["etc", "usr"]
    found = {str(path.relative_to(layer)) for path in layer.rglob("*") if path.is_file()}
    assert found == {*HELLO, "usr/bin/old", "usr/lib/old/x", "usr/lib/old/z", "etc/old.conf"}
    kept = (layer / "usr/bin/hello").stat()
    assert stat.S_IMODE(kept.st_mode) == 0o755 and kept.st_uid == os.geteuid()
    assert not mark.exists() and any("srv" in text for text in progress)


@pytest.mark.requirement("R151")
async def test_a_package_is_fetched_once_for_all_callers_and_orders(tmp_path: Path, mirror: Index) -> None:
    """Also after a restart without the mirror."""
    one = add(mirror, "hello", package(tmp_path, "hello", HELLO))
    other = add(mirror, "other", package(tmp_path, "other", {"usr/share/other": "o"}))
    boxes = toolboxes(tmp_path, f"{mirror.url}/debian")
    orders = [one + other, f"# a note\n\n{other}{one}"]
    made = await asyncio.gather(*(prepared(boxes, lock) for lock in orders * 4))
    assert len({box.id for box, _ in made}) == 1
    assert set(mirror.fetched.values()) == {1} and len(mirror.fetched) == 2
    mirror.files.clear()
    again = toolboxes(tmp_path, "http://127.0.0.1:1/debian")
    box, _ = await prepared(again, one + other)
    layer = again.mounted(box.id).root_layer
    assert layer is not None and (layer / "usr/bin/hello").is_file()


@pytest.mark.requirement("R151", "R56")
async def test_each_failure_is_typed_and_leaves_nothing(tmp_path: Path, mirror: Index) -> None:
    """An unknown package and a wrong file are not asked for again; a mirror that is away is."""
    content = package(tmp_path, "hello", HELLO)
    lock = line("hello", content)
    boxes = toolboxes(tmp_path, f"{mirror.url}/debian", f"{mirror.url}/security")
    error = await refusal(boxes, lock)
    assert (error.metadata["debian_code"], error.metadata["permanent"]) == ("NOT_FOUND", "true")
    assert "hello=1.0" in error.message and set(mirror.fetched.values()) == {1} and len(mirror.fetched) == 2
    add(mirror, "hello", content + b"\n")
    error = await refusal(boxes, lock)
    assert (error.metadata["debian_code"], error.metadata["permanent"]) == ("HASH_MISMATCH", "true")
    add(mirror, "hello", content)
    error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian", most=len(content) - 1), lock)
    assert error.metadata["debian_code"] == "TOO_LARGE" and "debian_max_bytes" in error.message
    foreign = lock.replace("_all.deb", "_m68k.deb")
    assert (await refusal(boxes, foreign)).metadata["debian_code"] == "ARCHITECTURE"
    error = await refusal(toolboxes(tmp_path, "http://127.0.0.1:1/debian"), lock)
    assert (error.metadata["debian_code"], error.metadata["permanent"]) == ("UNREACHABLE", "false")
    with pytest.raises(FailedPrecondition, match="debian_mirrors") as refused:
        await prepared(toolboxes(tmp_path), lock)
    assert refused.value.reason == "CAPABILITY_MISSING"
    with pytest.raises(InvalidArgument) as invalid:
        await prepared(boxes, "hello")
    assert invalid.value.violations[0].field == "spec.debian_lock"


@pytest.mark.requirement("R151", "R56")
@pytest.mark.parametrize(
    ("proxy", "reason"),
    [
        ("http://reader:hunter2@127.0.0.1:1", "through the service's proxy"),
        ("reader:hunter2@127.0.0.1:1", "no valid answer"),
    ],
    ids=["away", "no URL"],
)
async def test_a_failure_shows_neither_addresses_nor_the_proxys_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str, reason: str
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    shown: list[str] = []
    boxes = DebianPackages(["http://deb.invalid/debian"], 1_000_000, UID, pause=lambda _: asyncio.sleep(0))
    (tmp_path / "content").mkdir()
    with structlog.testing.capture_logs() as logs, pytest.raises(Unavailable, match=reason) as refused:
        await boxes.install(debian_lock(line("hello", b"")), tmp_path / "content", shown.append)
    assert refused.value.metadata["debian_code"] == "UNREACHABLE" and len(logs) == 4
    text = " ".join([refused.value.message, *shown])
    assert not any(secret in text for secret in ("hunter2", "reader", "127.0.0.1", "deb.invalid"))
    assert "hunter2" not in str(logs)


@pytest.mark.requirement("R151", "R90")
async def test_a_redirect_is_followed_below_the_mirrors_alone(tmp_path: Path) -> None:
    content = package(tmp_path, "hello", HELLO)
    asked: list[str] = []
    targets = {"/good": "/other", "/out": "/elsewhere", "/damaged": "http://[bad", "/unnamed": "http://a..b/"}

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        top, _, path = request.path.removeprefix("/").partition("/")
        if top == "other":
            return web.Response(body=content)
        target = targets[f"/{top}"]
        raise web.HTTPFound(target if target.startswith("http") else f"{target}/{path}?signed")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with test_utils.TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        for top in ("out", "damaged", "unnamed"):
            error = await refusal(toolboxes(tmp_path, f"{url}/{top}"), line("hello", content))
            assert error.metadata["debian_code"] == "UNREACHABLE" and "elsewhere" not in error.message
        assert not any(path.startswith("/elsewhere") for path in asked)
        await prepared(toolboxes(tmp_path, f"{url}/good", f"{url}/other"), line("hello", content))


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    "url",
    [
        "http://u:hunter2@h/debian",
        "http://:hunter2@h/debian",
        "http://@h/hunter2",
        "http://h/hunter2/../..",
        "http://h/hunter2/%2e%2e/x",
        "http://h/hunter2%2f..",
        "http://h/hunter2\\..",
        "http://h\n/hunter2",
        "http://h/hunter2 x",
        "http://h/hunter2\u2028",
        "http://h:99999/hunter2",
        "http://[h/hunter2",
        "http:///hunter2",
        "http://h/hunter2?x",
        "file:///hunter2",
    ],
)
def test_a_mirror_that_is_no_plain_url_is_refused_without_being_shown(url: str) -> None:
    good = "http://deb.debian.org/debian"
    assert SandboxSettings(debian_mirrors=(f"{good}/",), anonymous=True).debian_mirrors == (good,)
    with pytest.raises(ValidationError, match="URL 2 must be as") as refused:
        SandboxSettings(debian_mirrors=(good, url), anonymous=True)
    assert refused.value.errors()[0]["loc"] == ("debian_mirrors",)
    assert "hunter2" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("url", "is_below"),
    [
        ("http://m/debian/pool/x", True),
        ("http://m/debian", False),
        ("http://m/debian2/x", False),
        ("http://m/debian/../x", False),
        ("http://m/debian/%2e%2e/x", False),
        ("http://m/debian/a%2f..%2f..%2fx", False),
        ("http://m/debian/..%5cx", False),
        ("http://m:81/debian/x", False),
        ("https://m/debian/x", False),
        ("http://u:p@m/debian/x", False),
        ("file:///debian/x", False),
        ("/debian/x", False),
    ],
)
def test_only_a_place_below_a_mirror_is_below_it(url: str, is_below: bool) -> None:
    assert debian_mirrors.below(URL(url), URL("http://m/debian")) is is_below


def archive(*members: tuple[str, str, str]) -> bytes:
    """A package by hand: members are a name, what it links to if it is a link, and content."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, target, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    packed = lzma.compress(data.getvalue())
    parts = [("debian-binary", b"2.0\n"), ("control.tar", b""), ("data.tar.xz", packed)]
    return b"!<arch>\n" + b"".join(
        f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        for name, content in parts
    )


@pytest.mark.requirement("R151", "R142")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive(("../out", "", "x")), "leads out"),
        (archive(("usr", "/tmp", ""), ("usr/x", "", "x")), "is no directory"),
        (archive()[:-5], "ends early"),
        (b"!<arch>\n" + b"x" * 60, "has none of data.tar"),
        (b"no archive", "is no Debian package"),
        (archive(("usr/.wh.python3", "", "")), "would delete another"),
        (archive(("usr/lib/.wh..wh..opq", "", "")), "would hide a directory"),
        (archive(("opt/" + "d/" * 300 + "x", "", "")), "nested more than 256 deep"),
        (archive(("usr/" + "n" * 300, "", "")), "cannot be written: File name too long"),
    ],
    ids=["out", "through a link", "short", "no data", "no archive", "deletion", "opaque", "deep", "long name"],
)
async def test_a_package_that_is_no_plain_tree_is_refused(
    tmp_path: Path, mirror: Index, content: bytes, reason: str
) -> None:
    lock = add(mirror, "hello", content)
    error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian"), lock)
    assert error.metadata["debian_code"] == "UNUSABLE" and reason in error.message
    assert sorted(child.name for child in tmp_path.iterdir()) == ["toolboxes"]


@pytest.mark.requirement("R151")
async def test_a_file_of_two_packages_is_the_same_ones_in_each_order(tmp_path: Path, mirror: Index) -> None:
    """Both orders are one toolbox."""
    lines = [add(mirror, name, archive(("usr/bin/tool", "", name))) for name in ("one", "two")]
    found = []
    for number, lock in enumerate(("".join(lines), "".join(reversed(lines)))):
        boxes = toolboxes(tmp_path / f"{number}", f"{mirror.url}/debian")
        box, _ = await prepared(boxes, lock)
        layer = boxes.mounted(box.id).root_layer
        assert layer is not None
        found.append((box.id, (layer / "usr/bin/tool").read_text()))
    assert found == [(found[0][0], "two")] * 2


@pytest.mark.requirement("R151")
async def test_names_of_a_packages_author_are_shown_printable_and_bounded(tmp_path: Path, mirror: Index) -> None:
    lock = add(mirror, "odd", archive(("usr/x", "", ""), ("\x1b[2J", "", ""), ("n" * 250, "", "")))
    _, progress = await prepared(toolboxes(tmp_path, f"{mirror.url}/debian"), lock)
    (shown,) = (text for text in progress if "left out" in text)
    assert r"\x1b[2J" in shown and "n" * 200 in shown and "n" * 201 not in shown and shown.isprintable()


@pytest.mark.requirement("R151", "R142")
def test_nothing_of_a_tree_can_be_written_by_others(tmp_path: Path) -> None:
    """What its links lead to is left alone."""
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.touch()
    (tree / "usr/closed").mkdir(parents=True)
    (tree / "usr/closed/file").touch()
    (tree / "usr/link").symlink_to(outside)
    for path, mode in ((outside, 0o666), (tree / "usr/closed/file", 0o666), (tree / "usr/closed", 0o1072)):
        path.chmod(mode)
    debian_tree.check(tree)
    kept = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (outside, *(tree / "usr").rglob("*"))}
    assert kept == {"outside": 0o666, "link": 0o666, "closed": 0o1750, "file": 0o644}


@pytest.mark.requirement("R151")
async def test_what_packages_unpack_to_is_bounded_together(tmp_path: Path, mirror: Index) -> None:
    lock = "".join(
        add(mirror, name, package(tmp_path, name, {f"usr/share/{name}": "0" * 60_000})) for name in ("one", "two")
    )
    boxes = toolboxes(tmp_path, f"{mirror.url}/debian", most=100_000)
    assert (await refusal(boxes, lock)).metadata["debian_code"] == "TOO_LARGE"
    assert len(debian_lock(lock)) == 2


@pytest.mark.requirement("R151")
async def test_entries_count_over_all_packages(tmp_path: Path, mirror: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories and links take no bytes of content, but inodes: usr, too, which neither package lists."""
    lock = "".join(
        add(mirror, name, archive(*((f"usr/{name}{number}", "nowhere", "") for number in range(20))))
        for name in ("one", "two")
    )
    error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian", most=41 * 4096 - 1), lock)
    assert error.metadata["debian_code"] == "TOO_LARGE" and error.metadata["packages"] == "two"
    await prepared(toolboxes(tmp_path, f"{mirror.url}/debian", most=41 * 4096), lock)
    monkeypatch.setattr(store, "MOST_ENTRIES", 40)
    error = await refusal(toolboxes(tmp_path / "other", f"{mirror.url}/debian"), lock)
    assert error.metadata["debian_code"] == "TOO_LARGE" and "40 entries" in error.message


@pytest.mark.requirement("R151", "R95")
async def test_a_package_of_many_entries_is_refused_before_they_are_there(
    tmp_path: Path, mirror: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk's inodes are used up by one package: what fits is counted while it is unpacked."""
    there = list[int]()

    async def watched(blob: int, tree: Path, *given: Any) -> Any:
        try:
            return await unpacked(blob, tree, *given)
        finally:
            there.append(sum(1 for _ in tree.rglob("*")))

    monkeypatch.setattr(debian_packages, "unpacked", watched)
    lock = add(mirror, "many", archive(*((f"usr/{number}", "nowhere", "") for number in range(200))))
    error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian", most=40 * 4096), lock)
    assert error.metadata["debian_code"] == "TOO_LARGE" and "or 40 entries" in error.message
    assert [0 < count <= 40 + len(("usr",)) for count in there] == [True]


@pytest.mark.requirement("R151", "R90")
@pytest.mark.parametrize("first", ["usr/lib", "lib"])
async def test_no_link_of_a_package_leads_out_of_what_is_mounted(tmp_path: Path, mirror: Index, first: str) -> None:
    """Neither by what another package has there, nor by the mount of /usr/lib itself."""
    outside = tmp_path / "outside"
    outside.mkdir()
    lock = add(mirror, "links", archive(("usr/lib", str(outside), "")))
    lock += add(mirror, "writes", archive((f"{first}/planted", "", "x")))
    error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian"), lock)
    assert error.metadata["debian_code"] == "UNUSABLE" and not any(outside.iterdir())


@pytest.mark.requirement("R151", "R90")
async def test_a_packages_link_in_the_place_of_usr_leads_nothing_out(tmp_path: Path, mirror: Index) -> None:
    """What is beside usr is moved into it, as root: neither a file nor a mode outside is changed."""
    outside = tmp_path / "outside"
    (outside / "lib").mkdir(parents=True)
    outside.chmod(0o711)
    for name in ("bin", "lib"):
        lock = add(mirror, name, archive(("usr", str(outside), ""), (f"{name}/planted", "", "x")))
        error = await refusal(toolboxes(tmp_path, f"{mirror.url}/debian"), lock)
        assert error.metadata["debian_code"] == "UNUSABLE" and "/usr is no directory" in error.message
    assert [path.name for path in outside.rglob("*")] == ["lib"] and stat.S_IMODE(outside.stat().st_mode) == 0o711


@pytest.mark.requirement("R151", "R90")
@pytest.mark.parametrize("first", ["debian", "./debian", ".//debian", "debian/"])
async def test_no_file_of_a_caller_is_among_the_packages(tmp_path: Path, mirror: Index, first: str) -> None:
    """There it would be written through their links, or be in places of the sandbox that packages may not have."""
    outside = tmp_path / "outside"
    outside.mkdir()
    lock = add(mirror, "links", archive(("usr/lib/ssl/certs", str(outside), "")))
    boxes = toolboxes(tmp_path, f"{mirror.url}/debian")
    path = f"{first}/usr/lib/ssl/certs/x.pem" if first != "debian/" else first
    spec = ToolboxSpec("task", debian_lock=lock, files=(ToolboxFile("bin/x", b""), ToolboxFile(path, b"x", 0o755)))
    with pytest.raises(InvalidArgument) as refused:
        _ = [event async for event in boxes.prepare(spec)]
    assert refused.value.violations[0].field == "spec.files[1].path"
    assert not any(outside.iterdir()) and not mirror.fetched
