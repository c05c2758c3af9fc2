"""Files, links, names and archives of somebody who wants to harm: each ends as it should or in a typed error."""

from __future__ import annotations

import io
import tarfile

import pytest
from tests.conformance.sandbox.conftest import Box, failure

from penstock.sandbox.v1 import file_service_pb2 as fs

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(box: Box, path: str, page_size: int) -> list[fs.FileInfo]:
    """All entries of a directory, told in pages."""
    found: list[fs.FileInfo] = []
    token = ""
    while True:
        request = fs.ListRequest(sandbox_id=box.id, path=path, page_size=page_size, page_token=token)
        page = await box.service.files.List(request, timeout=60)
        assert len(page.entries) <= page_size
        found += page.entries
        token = page.next_page_token
        if not token:
            return found


# What may be read ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R14", "R98")
async def test_a_file_is_read_with_the_rights_of_the_sandboxs_user(box: Box) -> None:
    """What serves files may have rights of its own, and lends none of them."""
    for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/maps", "/proc/1/auxv"):
        if (await box.run("head", "-c1", path)).exit.code == 0:
            continue  # gVisor's own first process hides nothing
        error = await failure(box.read(path))
        assert error.reason in ("FILE_PERMISSION", "FILE_NOT_FOUND", "FILE_UNREADABLE"), path


@pytest.mark.requirement("R14", "R98")
async def test_file_server_cannot_be_made_to_read_its_own_process(box: Box) -> None:
    """Its environment and memory are its own, whatever the kernel lets a process read of itself."""
    for path in ("/proc/self/environ", "/proc/self/mem", "/proc/thread-self/environ", "/proc/self/cmdline"):
        for follow in (False, True):
            error = await failure(box.read(path, follow_symlink=follow))
            assert error.reason in ("FILE_PERMISSION", "FILE_NOT_FOUND"), path


@pytest.mark.requirement("R80", "R98")
async def test_a_file_that_the_kernel_cannot_read_is_a_typed_error(box: Box) -> None:
    """The memory of a process has nothing at its beginning."""
    await box.start("sleeper", shell="echo $$ > pid; exec sleep 1000")
    pid = await box.out("until [ -s pid ]; do :; done; cat pid")
    error = await failure(box.read(f"/proc/{pid}/mem"))
    assert error.reason in ("FILE_UNREADABLE", "FILE_PERMISSION", "FILE_NOT_FOUND", "NOT_A_FILE")


@pytest.mark.requirement("R98")
async def test_irregular_files_are_refused_unopened(box: Box) -> None:
    """To open a pipe lets go whoever waits to write to it."""
    await box.out("mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'")
    await box.start("writer", shell="echo ready > started; echo content > pipe")
    await box.out("until [ -s started ]; do :; done")
    for _ in range(5):
        assert (await failure(box.read("pipe"))).reason == "NOT_A_FILE"
        await box.out("true")
    assert await box.out("timeout 30 cat pipe") == "content"
    for path in ("sock", "/dev/null", "/dev/zero", "/dev/tty", "/proc"):
        error = await failure(box.read(path, follow_symlink=True))
        assert error.reason in ("NOT_A_FILE", "FILE_NOT_FOUND"), path


@pytest.mark.requirement("R75", "R98")
async def test_reads_follow_links_on_the_way_and_changes_do_not(box: Box) -> None:
    """The same on every backend, as docs/errors.md says."""
    await box.out("mkdir -p real/in; echo content > real/in/file; ln -s real linked")
    assert (await box.read("linked/in/file"))[0] == b"content\n"
    stub = box.service.files
    info = (await stub.Stat(fs.StatRequest(sandbox_id=box.id, path="linked/in/file"), timeout=30)).info
    assert info.kind == fs.FILE_KIND_FILE
    assert [entry.name for entry in await listed(box, "linked/in", 10)] == ["file"]
    tree = bytearray()
    async for event in stub.ReadTree(fs.ReadTreeRequest(sandbox_id=box.id, path="linked/in"), timeout=30):
        tree += event.tar_chunk
    assert b"content\n" in tree
    for change in (
        box.write("linked/in/new", b"x"),
        box.write_tree("linked/in", archive(member("new"))),
        stub.MakeDirectory(fs.MakeDirectoryRequest(sandbox_id=box.id, path="linked/in/new"), timeout=30),
        stub.Remove(fs.RemoveRequest(sandbox_id=box.id, path="linked/in/file"), timeout=30),
        stub.Remove(fs.RemoveRequest(sandbox_id=box.id, path="linked/in", recursive=True), timeout=30),
    ):
        assert (await failure(change)).reason == "SYMLINK_IN_PATH"
    assert await box.out("ls -A real/in") == "file"
    # The link itself is removed, and what has no directory is gone already.
    for path in ("linked", "nowhere/at/all"):
        await stub.Remove(fs.RemoveRequest(sandbox_id=box.id, path=path, recursive=True), timeout=30)
    assert await box.out("ls -A; cat real/in/file") == "real\ncontent"


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R26", "R98")
async def test_undecodable_names_are_listed_once_each(box: Box) -> None:
    """In pages of any size, in one order."""
    make = "import os\nfor i in range(128, 256):\n  open(b'd/%c' % i, 'w').close(); open(b'd/a%c' % i, 'w').close()\n"
    await box.out("mkdir d few")
    made = await box.run("python3", "-c", make + "for i in range(250, 256): open(b'few/%c' % i, 'w').close()\n")
    assert made.exit.code == 0, made
    for path, page_size, count in (("few", 1, 6), ("d", 77, 256), ("d", 1000, 256)):
        assert len(await listed(box, path, page_size)) == count
    token = fs.ListRequest(sandbox_id=box.id, path="d", page_token="no such token")
    assert (await failure(box.service.files.List(token, timeout=30))).reason == "FIELD_INVALID"


@pytest.mark.requirement("R13", "R98")
async def test_page_of_long_links_is_listed(box: Box) -> None:
    """What serves a sandbox says no more at once than its service takes."""
    make = "import os\nos.mkdir('d')\nfor i in range(1000): os.symlink(b'\\xff' * 4000, 'd/%04d' % i)\n"
    made = await box.run("python3", "-c", make)
    assert made.exit.code == 0, made
    entries = await listed(box, "d", 1000)
    assert [entry.name for entry in entries] == [f"{number:04}" for number in range(1000)]
    assert all(len(entry.link_target) == 4000 for entry in entries)


@pytest.mark.requirement("R26")
async def test_directory_emptied_while_listed_is_listed_to_its_end(box: Box) -> None:
    await box.out("mkdir d; cd d; touch $(seq 100)")
    request = fs.ListRequest(sandbox_id=box.id, path="d", page_size=10)
    page = await box.service.files.List(request, timeout=30)
    assert len(page.entries) == 10
    await box.out("rm -r d/*; touch d/new")
    names = []
    while page.next_page_token:
        request.page_token = page.next_page_token
        page = await box.service.files.List(request, timeout=30)
        names += [entry.name for entry in page.entries]
    assert set(names) <= {"new"}


# Archives ------------------------------------------------------------------------------------------------------------


def member(name: str, **fields: object) -> tarfile.TarInfo:
    """A member without content."""
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive(*members: tarfile.TarInfo) -> bytes:
    """A tar of members whose content is zeros."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as made:
        for one in members:
            made.addfile(one, io.BytesIO(bytes(one.size)))
    return sink.getvalue()


def header(name: str, kind: bytes, size: int, content: bytes = b"") -> bytes:
    """A raw member whose header claims a size, before content of another."""
    info = member(name, type=kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def pax(**records: str) -> bytes:
    """A header that describes the member after it."""
    body = b""
    for key, value in records.items():
        rest = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(rest) + len(str(len(rest) + 3))
        body += str(length).encode() + rest
    return header("pax", tarfile.XHDTYPE, len(body), body)


FILE = archive(member("file"))[:512]
END = bytes(1024)
OUT = "../\udcff"
HOSTILE = {
    "a negative size": (header("n", tarfile.REGTYPE, -(8 << 30)), "TAR_MEMBER_REFUSED"),
    "a negative size by pax": (pax(size="-1024") + FILE, "TAR_MEMBER_REFUSED"),
    "a negative header": (header("n", tarfile.XHDTYPE, -512), "TAR_MEMBER_REFUSED"),
    "a header of gigabytes": (header("n", tarfile.XHDTYPE, 4 << 30), "TAR_MEMBER_REFUSED"),
    "a name of gigabytes": (header("n", tarfile.GNUTYPE_LONGNAME, 4 << 30), "TAR_MEMBER_REFUSED"),
    "headers of headers": (pax(comment="x") * 2000 + FILE, "TAR_UNREADABLE"),
    "terabytes of holes": (header("n", tarfile.GNUTYPE_SPARSE, 512, bytes(512)), "TAR_MEMBER_REFUSED"),
    "holes by pax": (
        pax(GNU__sparse__major="1", GNU__sparse__minor="0", GNU__sparse__realsize=str(8 << 40))
        + header("n", tarfile.REGTYPE, 512, b"0\n"),
        "TAR_MEMBER_REFUSED",
    ),
    "a terabyte that is not there": (header("n", tarfile.REGTYPE, 1 << 40), "TREE_TOO_LARGE"),
    "a NUL in a name": (pax(path="a\0b") + FILE, "TAR_MEMBER_REFUSED"),
    "a NUL in a link": (pax(linkpath="a\0b") + header("l", tarfile.SYMTYPE, 0), "TAR_MEMBER_REFUSED"),
    "a link to nothing": (header("l", tarfile.SYMTYPE, 0), "TAR_MEMBER_REFUSED"),
    "an absolute path by pax": (pax(path="/tmp/escape") + FILE, "TAR_MEMBER_REFUSED"),
    "a way out by a long name": (
        header("n", tarfile.GNUTYPE_LONGNAME, 12, b"../../escape") + FILE,
        "TAR_MEMBER_REFUSED",
    ),
    "a link out by pax": (pax(linkpath="../../escape") + header("l", tarfile.SYMTYPE, 0), "TAR_MEMBER_REFUSED"),
    "a block device": (header("d", tarfile.BLKTYPE, 0), "TAR_MEMBER_REFUSED"),
    "a name of bytes that leads out": (
        header(b"../\xff".decode(errors="surrogateescape"), tarfile.REGTYPE, 0),
        "TAR_MEMBER_REFUSED",
    ),
}


@pytest.mark.requirement("R75", "R80", "R145")
@pytest.mark.parametrize("padding", [0, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_archive_is_refused_before_anything_is_unpacked(box: Box, what: str, padding: int) -> None:
    """What it claims costs nothing, whether what serves files reads it itself or has a child do it."""
    raw, reason = HOSTILE[what]
    content = FILE + header("filler", tarfile.REGTYPE, padding, bytes(padding)) + raw + END
    error = await failure(box.write_tree("dst", content))
    assert error.reason == reason, error
    # And the sandbox is served as before.
    assert await box.out("ls -A") == ""


@pytest.mark.requirement("R75")
async def test_members_that_name_one_path_twice_replace_each_other_and_follow_nothing(box: Box) -> None:
    """A link that one member makes leads no later one astray."""
    await box.out("mkdir dst outside; echo victim > outside/file")
    link = member("l", type=tarfile.SYMTYPE, linkname="file")
    twice = archive(member("file", size=3), link, member("l", size=5), member("file", size=1))
    assert (await box.write_tree("dst", twice)).entry_count == 4
    assert await box.out("stat -c '%n %F %s' dst/*") == "dst/file regular file 1\ndst/l regular file 5"
    astray = archive(member("d", type=tarfile.DIRTYPE), member("s", type=tarfile.SYMTYPE, linkname="d"), member("s/x"))
    assert (await failure(box.write_tree("dst", astray))).reason == "SYMLINK_IN_PATH"
    below = archive(member("f"), member("f/x"))
    assert (await failure(box.write_tree("dst", below))).reason == "NOT_A_DIRECTORY"
    assert await box.out("cat outside/file; ls outside") == "victim\nfile"


@pytest.mark.requirement("R75")
async def test_hard_links_of_an_archive_stay_in_its_tree(box: Box) -> None:
    await box.out("mkdir dst; echo victim > victim; ln -s ../victim dst/way")
    hard = archive(member("way2", type=tarfile.LNKTYPE, linkname="way"))
    await box.write_tree("dst", hard)
    # Another name of the link, not of what it leads to.
    assert await box.out("stat -c %h victim; readlink dst/way2") == "1\n../victim"
    missing = archive(member("h", type=tarfile.LNKTYPE, linkname="nothing"))
    assert (await failure(box.write_tree("dst", missing))).reason == "FILE_NOT_FOUND"


@pytest.mark.requirement("R44", "R89")
async def test_an_archive_of_thousands_of_entries_is_unpacked(box: Box) -> None:
    answer = await box.write_tree("dst", archive(*(member(f"d/{number}") for number in range(2_500))))
    assert answer.entry_count == 2_500
    assert await box.out("ls dst/d | wc -l") == "2500"
    assert len(await listed(box, "dst/d", 1000)) == 2_500
