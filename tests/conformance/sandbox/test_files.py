"""What every backend owes a file: its bytes, its place, its owner, and no way out of the sandbox."""

from __future__ import annotations

import hashlib
import io
import pwd
import tarfile

import pytest
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.services import Running

from penstock.sandbox.v1 import file_service_pb2 as fs
from penstock_chassis.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, PermissionDenied

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAMES = [
    "plain",
    "with space",
    "quote'\"",
    "$(leak)",
    "-n",
    "é€𝄞",
    "new\nline",
    "*",
    "a" * 255,
    ".hidden",
    "back\\slash",
]


@pytest.mark.requirement("R44")
@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 3_000_001])
async def test_a_file_of_any_size_comes_back_as_it_was_written(box: Box, size: int) -> None:
    content = hashlib.shake_128(b"content").digest(size)
    digest = hashlib.sha256(content).digest()
    written = await box.write("file", content, sha256=digest)
    assert (written.size_bytes, written.sha256) == (size, digest)
    assert await box.read("file") == (content, digest)
    assert (await box.out("sha256sum file")).split()[0] == digest.hex()


@pytest.mark.requirement("R44")
async def test_a_hundred_megabytes_go_in_and_come_out(fresh_box: Box) -> None:
    content = bytes(1024 * 1024) * 100
    await fresh_box.write("big", content)
    returned, digest = await fresh_box.read("big")
    assert len(returned) == len(content) and digest == hashlib.sha256(content).digest()


@pytest.mark.requirement("R42", "R44")
@pytest.mark.parametrize("name", NAMES)
async def test_a_name_of_any_content_is_a_name(box: Box, name: str) -> None:
    await box.write(f"odd/{name}", b"x")
    assert (await box.read(f"odd/{name}"))[0] == b"x"
    listed = await box.service.files.List(fs.ListRequest(sandbox_id=box.id, path="odd"), timeout=30)
    assert [entry.name for entry in listed.entries] == [name]
    assert (await box.run("cat", f"odd/{name}")).stdout == b"x"


@pytest.mark.requirement("R44", "R45")
async def test_written_files_belong_to_the_user_with_the_given_mode(fresh_box: Box) -> None:
    """Parents are created."""
    script = f"{fresh_box.sandbox.home}/a/b/script"
    await fresh_box.write(script, b"#!/bin/sh\necho ran\n", mode=0o755)
    await fresh_box.write("plain", b"")
    assert await fresh_box.out(script) == "ran"
    user = await fresh_box.out("id -un")
    assert await fresh_box.out("stat -c '%U %a' ~/a/b ~/a/b/script plain") == (f"{user} 755\n{user} 755\n{user} 644")


@pytest.mark.requirement("R44")
async def test_ranges_of_a_file_are_read_alone(box: Box) -> None:
    await box.write("file", b"0123456789")
    assert (await box.read("file", offset=3, length=4))[0] == b"3456"
    assert (await box.read("file", offset=8))[0] == b"89"
    assert (await box.read("file", offset=50))[0] == b""
    assert (await box.read("file", length=0))[0] == b""
    assert isinstance(await failure(box.read("file", offset=-1)), InvalidArgument)


@pytest.mark.requirement("R44")
async def test_a_wrong_digest_or_a_missing_end_leaves_the_old_content(box: Box) -> None:
    """A reader sees the old content or the new."""
    await box.write("file", b"old")
    assert isinstance(await failure(box.write("file", b"new", sha256=b"\0" * 32)), DataLoss)
    assert (await failure(box.write("file", b"new", end=False))).reason == "STREAM_INCOMPLETE"
    assert (await box.read("file"))[0] == b"old"
    assert await box.out("ls -A") == "file"


@pytest.mark.requirement("R44")
async def test_missing_and_forbidden_files_have_different_errors(box: Box) -> None:
    """Every outcome is checked."""
    error = await failure(box.read("absent"))
    assert isinstance(error, NotFound) and error.reason == "FILE_NOT_FOUND"
    await box.run(shell="echo secret > locked; chmod 000 locked; mkdir dir; mkfifo pipe")
    assert isinstance(await failure(box.read("locked")), PermissionDenied)
    assert isinstance(await failure(box.write("/usr/lib/planted", b"x")), PermissionDenied)
    for path in ("dir", "pipe", "/dev/zero", "/proc/self/mem"):
        error = await failure(box.read(path))
        assert error.reason in ("NOT_A_FILE", "FILE_PERMISSION", "FILE_NOT_FOUND"), path
    assert (await failure(box.write("dir", b"x"))).reason == "NOT_A_FILE"
    assert (await failure(box.write("locked/x", b"x"))).reason == "NOT_A_DIRECTORY"
    for path in ("", "a\0b"):
        assert isinstance(await failure(box.read(path)), InvalidArgument)


@pytest.mark.requirement("R75")
async def test_a_planted_link_leads_no_write_astray(box: Box) -> None:
    """Paths are recreated, links refused."""
    await box.run(shell="mkdir real; ln -s real linked; ln -s /etc/passwd target; echo keep > real/keep")
    error = await failure(box.write("linked/tests.py", b"x"))
    assert isinstance(error, FailedPrecondition) and error.reason == "SYMLINK_IN_PATH"
    # The link itself is replaced, not followed.
    await box.write("target", b"mine")
    assert await box.out("cat target; stat -c %F target; ls real") == "mineregular file\nkeep"


@pytest.mark.requirement("R75")
async def test_a_link_is_read_only_when_that_is_asked_for(box: Box) -> None:
    await box.run(shell="echo content > file; ln -s file link; ln -s /etc/shadow out")
    assert (await failure(box.read("link"))).reason == "NOT_A_FILE"
    assert (await box.read("link", follow_symlink=True))[0] == b"content\n"
    # The sandbox's own view: what the host has there cannot be reached.
    assert (await failure(box.read("out", follow_symlink=True))).reason in ("FILE_NOT_FOUND", "FILE_PERMISSION")


@pytest.mark.requirement("R12", "R47")
async def test_the_hosts_files_are_not_there(box: Box, service: Running) -> None:
    for path in ("/etc/shadow", "/root/.bashrc", str(service.state_dir), "/sys/kernel", "/proc/1/root/etc/shadow"):
        assert (await failure(box.read(path))).reason in ("FILE_NOT_FOUND", "FILE_PERMISSION"), path
    people = {entry.pw_name for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 65534}
    accounts = (await box.read("/etc/passwd"))[0].decode().splitlines()
    assert not people & {account.partition(":")[0] for account in accounts} - {"agent", "user"}


@pytest.mark.requirement("R44")
async def test_directories_are_made_listed_and_removed(box: Box) -> None:
    stub, box_id = box.service.files, box.id
    for _ in range(2):
        await stub.MakeDirectory(fs.MakeDirectoryRequest(sandbox_id=box_id, path="d/e/f", mode=0o700), timeout=30)
    for index in range(5):
        await box.write(f"d/{index}", b"")
    names, token = [], ""
    while True:
        page = await stub.List(fs.ListRequest(sandbox_id=box_id, path="d", page_size=2, page_token=token), timeout=30)
        names += [entry.name for entry in page.entries]
        token = page.next_page_token
        if not token:
            break
    assert names == ["0", "1", "2", "3", "4", "e"]
    info = (await stub.Stat(fs.StatRequest(sandbox_id=box_id, path="d/e/f"), timeout=30)).info
    assert (info.name, info.kind, info.mode) == ("f", fs.FILE_KIND_DIRECTORY, 0o700)
    remove = fs.RemoveRequest(sandbox_id=box_id, path="d")
    assert (await failure(stub.Remove(remove))).reason == "DIRECTORY_NOT_EMPTY"
    remove.recursive = True
    for _ in range(2):
        await stub.Remove(remove, timeout=30)
    assert await box.out("ls -A") == ""


@pytest.mark.requirement("R75")
async def test_removing_a_tree_with_links_removes_the_links_only(box: Box) -> None:
    await box.run(shell="mkdir keep tree; echo x > keep/file; ln -s ../keep tree/link; ln -s /workspace/keep tree/abs")
    request = fs.RemoveRequest(sandbox_id=box.id, path="tree", recursive=True)
    await box.service.files.Remove(request, timeout=30)
    assert await box.out("ls; cat keep/file") == "keep\nx"


@pytest.mark.requirement("R44")
async def test_tree_download_is_a_complete_tar(box: Box) -> None:
    await box.run(shell="mkdir -p t/sub; echo a > t/a; echo b > t/sub/b; chmod 750 t/sub/b; ln -s a t/l; mkfifo t/fifo")
    content, digest = bytearray(), b""
    async for event in box.service.files.ReadTree(fs.ReadTreeRequest(sandbox_id=box.id, path="t"), timeout=30):
        content += event.tar_chunk
        digest = event.sha256
    assert digest == hashlib.sha256(content).digest()
    with tarfile.open(fileobj=io.BytesIO(bytes(content))) as archive:
        assert sorted(archive.getnames()) == ["a", "l", "sub", "sub/b"]
        assert archive.getmember("sub/b").mode == 0o750
        assert archive.getmember("l").linkname == "a"
        file = archive.extractfile("sub/b")
        assert file is not None and file.read() == b"b\n"
    call = box.service.files.ReadTree(fs.ReadTreeRequest(sandbox_id=box.id, path="t", max_bytes=1), timeout=30)
    assert (await failure(call)).reason == "TREE_TOO_LARGE"


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


@pytest.mark.requirement("R75", "R76")
async def test_a_layer_lands_whatever_somebody_left_in_its_way(box: Box) -> None:
    """Links, pipes, directories, files in the place of directories, locked doors; and it removes."""
    await box.run(
        shell="mkdir -p real folder/deep locked sealed/in old; echo keep | tee real/keep sealed/in/keep; "
        "ln -s real linked; ln -s /etc/passwd target; mkfifo pipe; echo x | tee file folder/deep/x old/x; "
        "echo x > locked/gone; ln -s real/keep rest; chmod 000 locked sealed sealed/in folder"
    )
    names = ("linked/a", "target", "pipe", "file/a", "folder", "locked/a", "sealed/in/a", "new/a")
    removed = (".wh.old", "locked/.wh.gone", "nowhere/.wh.x", ".wh.rest", "linked/.wh.keep")
    answer = await box.write_tree(
        ".", tar(*((member(name), b"") for name in removed), *((member(name), b"new") for name in names)), layer=True
    )
    assert answer.entry_count == len(names) + len(removed)
    for name in names:
        assert await box.out(f"cat {name}; stat -c ' %F' {name}") == "new regular file", name
    assert (
        await box.out("cat real/keep sealed/in/keep; ls -d old locked/gone nowhere rest 2>/dev/null; true")
        == "keep\nkeep"
    )
    for name in (".wh.", ".wh..", ".wh...", "d/.wh..", "../.wh.x", "/.wh.x"):
        refused = await failure(box.write_tree(".", tar((member(name), b"")), layer=True))
        assert refused.reason == "TAR_MEMBER_REFUSED", name
    await box.write_tree(".", tar((member("plain/.wh.x"), b"content")))
    assert await box.out("cat plain/.wh.x") == "content", "it means something in a layer only"


@pytest.mark.requirement("R75", "R76")
@pytest.mark.parametrize("mode", ["500", "000"])
async def test_a_small_layer_lands_in_a_directory_that_its_owner_locked(box: Box, mode: str) -> None:
    """Small layers go another way than large ones, with the same end."""
    await box.run(shell=f"mkdir -p a/locked a/open; echo old | tee a/locked/x a/open/x; chmod {mode} a/locked")
    layer = tar(*((member(name), b"new") for name in ("a/open/x", "a/locked/x", "a/made/x", "a/open/y/x")))
    await box.write_tree(".", layer, layer=True)
    assert await box.out("cat a/open/x a/locked/x a/made/x a/open/y/x") == "new" * 4


@pytest.mark.requirement("R75", "R76")
async def test_a_small_layer_removes_files_and_lands_in_open_directories(box: Box) -> None:
    await box.run(shell="mkdir -p a; echo old | tee a/x a/y; ln -s x a/z")
    removed = ((member(name), b"") for name in ("a/.wh.x", "a/.wh.nothing", ".wh.neither"))
    await box.write_tree(".", tar(*removed, (member("a/z"), b"new"), (member("a/w"), b"new")), layer=True)
    assert await box.out("cd a; ls; cat y z w; stat -c ' %F' z") == "w\ny\nz\nold\nnewnew regular file"


@pytest.mark.requirement("R76")
async def test_a_tar_keeps_modes_times_and_second_names(box: Box) -> None:
    """A member without a time has the present one, also where it is small."""
    dated = [member("d", tarfile.DIRTYPE, mode=0o3775), member("d/f", mode=0o2755), member("l", tarfile.SYMTYPE, "d/f")]
    for info in dated:
        info.pax_headers = {"mtime": "1000000000.123456789"}
    before = member("before")
    before.mtime, epoch = -1, member("epoch")
    epoch.pax_headers = {"mtime": "0.000000000"}
    links = [member("d/second", tarfile.LNKTYPE, "d/f"), member("third", tarfile.LNKTYPE, "d/f")]
    await box.write_tree(".", tar(*((info, b"") for info in (*dated, before, epoch, *links, member("now")))))
    assert await box.out("TZ=UTC stat -c %y d d/f l") == "\n".join(["2001-09-09 01:46:40.123456789 +0000"] * 3)
    assert await box.out("stat -c %Y before epoch") == "-1\n0"
    assert await box.out("test now -nt d/f && stat -c %a d d/f && stat -c %h d/f") == "3775\n2755\n3"


@pytest.mark.requirement("R76")
async def test_a_name_that_is_no_text_is_listed_in_bytes_too(box: Box) -> None:
    """Shown with the character that stands for anything else, which may be in a name."""
    await box.out(r"mkdir d; touch $(printf 'd/a\377') $(printf 'd/a\357\277\275')")
    answer = await box.service.files.List(fs.ListRequest(sandbox_id=box.id, path="d"), timeout=60)
    assert sorted((info.name, info.raw_name) for info in answer.entries) == [("a\ufffd", b""), ("a\ufffd", b"a\xff")]


@pytest.mark.requirement("R70", "R75")
async def test_a_tree_is_removed_however_deep_and_locked_it_is(box: Box) -> None:
    """By a remove and by a layer."""
    make = (
        "import os, sys; top = os.getcwd(); name = sys.argv[1]; os.mkdir(name); os.chdir(name)\n"
        "for _ in range(1050): os.mkdir('d'); os.chdir('d')\n"
        "open('f', 'w').close(); os.chdir(top); os.chmod(f'{name}/d', 0); os.chmod(name, 0)"
    )
    for name in ("one", "two"):
        made = await box.run("python3", "-c", make, name)
        assert made.exit.code == 0, made
    await box.service.files.Remove(fs.RemoveRequest(sandbox_id=box.id, path="one", recursive=True), timeout=60)
    await box.write_tree(".", tar((member("two"), b"new")), layer=True)
    assert await box.out("ls; cat two") == "two\nnew"


@pytest.mark.requirement("R44", "R76")
async def test_a_tar_is_unpacked_over_what_is_there(box: Box) -> None:
    await box.run(shell="mkdir dst; echo old > dst/a; echo victim > victim; ln -s ../victim dst/b")
    answer = await box.write_tree(
        "dst",
        tar(
            (member("sub", tarfile.DIRTYPE, mode=0o555), b""),
            (member("sub/c", mode=0o4755), b"c"),
            (member("a"), b"new"),
            (member("b"), b"replaced"),
            (member("l", tarfile.SYMTYPE, "sub/c"), b""),
            (member("h", tarfile.LNKTYPE, "a"), b""),
        ),
    )
    assert (answer.entry_count, answer.size_bytes) == (6, 12)
    assert await box.out("cat dst/a dst/b dst/l dst/h victim") == "newreplacedcnewvictim"
    # Neither set-user-id bits nor a link's target come from an archive.
    user = await box.out("id -un")
    assert await box.out("stat -c '%a %U' dst/sub dst/sub/c") == f"555 {user}\n755 {user}"


@pytest.mark.requirement("R75")
@pytest.mark.parametrize(
    "bad",
    [
        member("../escape"),
        member("/absolute"),
        member("a/../../b"),
        member("device", tarfile.CHRTYPE),
        member("fifo", tarfile.FIFOTYPE),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("link", tarfile.SYMTYPE, "../../x"),
        member("hard", tarfile.LNKTYPE, "../x"),
    ],
    ids=lambda info: f"{info.name}-{info.linkname}",
)
async def test_a_tar_with_a_bad_member_is_refused_before_anything_is_unpacked(box: Box, bad: tarfile.TarInfo) -> None:
    error = await failure(box.write_tree("dst", tar((member("good"), b"x"), (bad, b""))))
    assert isinstance(error, InvalidArgument) and error.reason == "TAR_MEMBER_REFUSED"
    assert await box.out("ls -A") == ""


@pytest.mark.requirement("R75")
async def test_a_tar_does_not_follow_a_link_that_is_in_the_way(box: Box) -> None:
    await box.run(shell="mkdir dst other; ln -s ../other dst/sub")
    error = await failure(box.write_tree("dst", tar((member("sub/file"), b"x"))))
    assert error.reason == "SYMLINK_IN_PATH"
    assert await box.out("ls other") == ""


@pytest.mark.requirement("R80")
async def test_invalid_tar_is_refused(box: Box) -> None:
    assert (await failure(box.write_tree("dst", b"not a tar" * 1000))).reason == "TAR_UNREADABLE"
