"""Images on the local backend: from a real registry on loopback to a sandbox, and every way in which that can fail."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from tests.support.docker.base_images import write_tiny
from tests.support.endpoints.loopback import serving
from tests.support.images.registry import MACHINE, PASSWORD, USER, Registry, digest, entry, layer, program, registry
from tests.support.waiting import eventually

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.images.registry import RegistryOptions
from penstock_sandbox.backends.images.store import ImageOptions, ImageStore
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.images import bases
from penstock_sandbox.domain.backend import MountedToolbox, SandboxHandle
from penstock_sandbox.domain.model import SandboxSpec
from penstock_sandbox.processes.output import Collected

_UNPACKER = 61_999


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with one static program and its names."""
    file = tmp_path_factory.mktemp("tiny") / "tiny.tar"
    write_tiny(file)
    return file.read_bytes()


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Registry]:
    """A registry of its own."""
    async with registry() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that users of sandboxes can enter."""
    for part in (tmp_path, *tmp_path.parents):
        if part.is_relative_to(tmp_path.parents[2]) and part.stat().st_uid == os.geteuid():
            part.chmod(0o755)
    return tmp_path


def _options(*hosts: str, **more: Any) -> ImageOptions:
    user = _UNPACKER if os.geteuid() == 0 else None
    return ImageOptions(RegistryOptions(plain_http=frozenset(hosts)), unpack_as=user, **more)


@asynccontextmanager
async def _backend(folder: Path, options: ImageOptions, **more: Any) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(LocalOptions(folder / "local", images=options, **more))
    await backend.open()
    assert backend.available, backend.unavailable_reason
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def _store(folder: Path, options: ImageOptions, **more: Any) -> AsyncIterator[ImageStore]:
    async def pause(_: float) -> None:
        pass

    store = ImageStore(folder / "images", options, pause=pause, **more)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()


async def _create(backend: LocalBackend, sandbox_id: str, **spec: Any) -> SandboxHandle:
    wanted = SandboxSpec(**spec)
    backend.refuse_unsupported(wanted)
    return await backend.create(sandbox_id, wanted, (), lambda _: None)


async def _out(sandbox: SandboxHandle, text: str) -> str:
    """The output of a shell text that must succeed."""
    sink = Collected()
    process = await sandbox.start(
        ["/bin/sh", "-c", text], sandbox.default_env, sandbox.workdir, sink, stdin=False, pty=None
    )
    ended = await sink.ended
    await sink.closed_output.wait()
    await process.aclose()
    assert ended is not None and ended.code == 0, sink.text
    return sink.text.decode().strip()


async def _refused(work: Any) -> PenstockError:
    with pytest.raises(PenstockError) as refused:
        await work
    return refused.value


def _nothing_left(folder: Path) -> None:
    images = folder / "local/images"
    assert not any((images / "images").iterdir()) and not any((folder / "local/sandboxes").iterdir())
    assert not any((images / "layers").iterdir())


# From a registry to a sandbox -----------------------------------------------------------------------------------------


@pytest.mark.requirement("R142")
async def test_a_sandbox_has_the_images_files_environment_and_working_directory(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    repository = layer([entry("testbed/"), entry("testbed/a.txt", b"first\n", mode=0o644), entry("bin/.wh.wc", b"")])
    config = {
        "Env": ["PATH=/bin", "FLAVOR=mint", "LD_PRELOAD=/x.so", "PENSTOCK_X=1"],
        "WorkingDir": "/testbed",
        "User": "0:0",
        "Entrypoint": ["/bin/false"],
    }
    await running.push("task", [tiny, repository], config)
    async with _backend(folder, _options(running.host)) as backend:
        sandbox = await _create(backend, "one", image=running.image("task"))
        assert sandbox.workdir == "/testbed" and sandbox.home == "/home/agent"
        assert sandbox.default_env["PATH"] == "/bin" and sandbox.default_env["FLAVOR"] == "mint"
        assert not {"LD_PRELOAD", "PENSTOCK_X"} & sandbox.default_env.keys()
        assert await _out(sandbox, "id -u; cat a.txt; echo second >> a.txt; echo x > new; echo x > ~/mine; pwd") == (
            "1000\nfirst\n/testbed"
        )
        # What only another layer deleted is gone, and what the host has is not there.
        assert await _out(sandbox, "ls /bin | grep -x wc; ls -d /usr /workspace 2>/dev/null; true") == ""
        # All but the user's own directories stays as it is (R90).
        assert await _out(sandbox, "(echo x > /bin/sh || mkdir /new || touch /testbed/../z) 2>&1; true") != ""
        assert await _out(sandbox, "ls /new /z 2>/dev/null; true") == ""
        other = await _create(backend, "two", image=running.image("task"))
        assert await _out(other, "cat a.txt; ls") == "first\na.txt"


@pytest.mark.requirement("R142", "R151")
async def test_packages_are_over_an_images_files_and_below_our_own(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    image = layer([entry("usr/share/a", b"image\n", mode=0o644), entry("usr/share/b", b"image\n", mode=0o644)])
    await running.push("task", [tiny, image], {})
    async with _backend(folder, _options(running.host)) as backend:
        content = folder / "local/toolboxes/box"
        for name, text in (("usr/share/a", "package\n"), ("usr/share/c", "package\n"), ("etc/hostname", "planted\n")):
            (content / "debian" / name).parent.mkdir(parents=True, exist_ok=True)
            (content / "debian" / name).write_text(text)
        box = MountedToolbox("box", content, "/opt/penstock/toolboxes/box", (), {}, root_layer=content / "debian")
        wanted = SandboxSpec(image=running.image("task"))
        sandbox = await backend.create("one", wanted, (box,), lambda _: None)
        names = " ".join(f"/usr/share/{name}" for name in "abc")
        assert (await _out(sandbox, f"cat {names} /etc/hostname")).split() == ["package", "image", "package", "sandbox"]
        assert "failed" in await _out(sandbox, f"rm -f {names} 2>/dev/null; test -f /usr/share/a && echo failed")
        await sandbox.destroy()


@pytest.mark.requirement("R142")
async def test_forks_of_a_prepared_image_have_its_files_and_workdir(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    await running.push("task", [tiny, layer([entry("app/"), entry("app/a", b"1", mode=0o644)])], {"WorkingDir": "/app"})
    async with _backend(folder, _options(running.host)) as backend:
        setup = await _create(backend, "setup", image=running.image("task"))
        await _out(setup, "echo 2 > a; mkdir sub")
        assert not backend.shows_host_programs(SandboxSpec(image=running.image("task")))
        await backend.seal(setup, "sealed")
        assert not backend.shows_host_programs(SandboxSpec(snapshot_id="sealed"))
        forks = [await _create(backend, f"fork{number}", snapshot_id="sealed") for number in range(2)]
        await _out(forks[0], "echo 3 > a")
        assert await _out(forks[1], "cat a; pwd; ls") == "2\n/app\na\nsub"
        await backend.remove_layer("sealed")


async def test_a_user_of_the_image_is_the_sandboxs_user(folder: Path, running: Registry, tiny: bytes) -> None:
    accounts = layer(
        [
            entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\nada:x:321:654::/srv/ada:/bin/sh\n", mode=0o644),
            entry("srv/ada/"),
            entry("srv/ada/notes", b"hers", mode=0o600, uid=321, gid=654),
        ]
    )
    await running.push("accounts", [tiny, accounts])
    image = running.image("accounts")
    async with _backend(folder, _options(running.host)) as backend:
        sandbox = await _create(backend, "one", image=image, user="ada")
        assert await _out(sandbox, "id -u; id -g; cat ~/notes; echo more >> ~/notes; pwd") == "321\n654\nhers/workspace"
        assert (await _refused(_create(backend, "two", image=image, user="bob"))).reason == "USER_UNKNOWN"
        assert (await _refused(_create(backend, "three", image=image, user="root"))).reason == "CAPABILITY_MISSING"


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
async def test_what_debians_tools_build_and_push_runs(
    folder: Path, running: Registry, tiny: bytes, compression: str
) -> None:
    layout, content = folder / "layout", folder / "content"
    content.mkdir()
    with tarfile.open(fileobj=io.BytesIO(tiny)) as archive:
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # since Python 3.11.4
        archive.extractall(content)
    (content / "made").write_text("by umoci")
    umoci, skopeo = program("umoci"), program("skopeo")
    for argv in (
        [umoci, "init", "--layout", layout],
        [umoci, "new", "--image", f"{layout}:1"],
        [umoci, "insert", "--rootless", "--image", f"{layout}:1", content, "/"],
        [umoci, "config", "--image", f"{layout}:1", "--config.env", "MADE=yes", "--config.workingdir", "/srv/work"],
        [
            skopeo,
            "--insecure-policy",
            "copy",
            "--dest-tls-verify=false",
            "--dest-compress-format",
            compression,
            f"oci:{layout}:1",
            f"docker://{running.host}/made-{compression}:1",
        ],
    ):
        command = [str(part) for part in argv]
        done = await asyncio.to_thread(
            lambda command=command: subprocess.run(command, capture_output=True, text=True, check=False)  # type: ignore[misc]
        )
        assert done.returncode == 0, done.stderr
    pushed = [
        program("skopeo"),
        "inspect",
        "--raw",
        "--tls-verify=false",
        f"docker://{running.host}/made-{compression}:1",
    ]
    raw = await asyncio.to_thread(subprocess.run, pushed, capture_output=True, text=True, check=True)
    assert {layer["mediaType"].rsplit("+", 1)[-1] for layer in json.loads(raw.stdout)["layers"]} == {compression}
    async with _backend(folder, _options(running.host)) as backend:
        sandbox = await _create(backend, "one", image=running.image(f"made-{compression}"))
        assert await _out(sandbox, "cat /made; echo; echo $MADE; pwd; echo x > mine") == "by umoci\nyes\n/srv/work"


async def test_images_share_layers_and_one_pull_serves_all_callers(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    for name in ("one", "two"):
        await running.push(name, [tiny, layer([entry(name, b"")])])
    async with _store(folder, _options(running.host)) as store:
        found = await asyncio.gather(*(store.get(running.image(name)) for name in ("one", "two") for _ in range(4)))
        assert len({image.id for image in found}) == 2
        assert {image.layers[0] for image in found} == {found[0].layers[0]}
    shared = digest(gzip.compress(tiny, 1, mtime=0))

    def times() -> int:
        asked = running.log.read_text()
        return sum(asked.count(f'"GET /v2/{name}/blobs/{shared} ') for name in ("one", "two"))

    await eventually(lambda: times() > 0, "the registry has written what it was asked")
    assert times() == 1


async def test_an_index_leads_to_this_machines_image(folder: Path, running: Registry, tiny: bytes) -> None:
    manifest = await running.push("many", [tiny], tag="mine")
    kind = "application/vnd.oci.image.manifest.v1+json"
    mine = {"mediaType": kind, "digest": manifest, "size": 1, "platform": {"os": "linux", "architecture": MACHINE}}
    other = {**mine, "platform": {"os": "linux", "architecture": "s390x"}}
    await running.push_index("many", "all", [other, mine])
    await running.push_index("many", "foreign", [other])
    async with _store(folder, _options(running.host)) as store:
        assert (await store.get(running.image("many", "all"))).layers
        assert (await store.get(f"{running.host}/many@{manifest}")).layers
        refused = await _refused(store.get(running.image("many", "foreign")))
        assert refused.reason == "IMAGE_WRONG_PLATFORM" and "s390x" in refused.message


# What can be wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R142")
async def test_each_refusal_has_its_reason_and_starts_nothing(
    folder: Path, running: Registry, tiny: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running.push("foreign", [tiny], architecture="s390x")
    await running.push("large", [layer([entry("zeros", b"\0" * 3_000_000)])])
    await running.push("lying", [tiny], diff_ids=["sha256:" + "0" * 64])
    await running.push("hostile", [layer([entry("../../planted", b"x")])])
    await running.push("deep", [layer([entry(f"l{number}", b"")]) for number in range(3)])
    reasons = {
        "absent": "IMAGE_UNKNOWN",
        "foreign": "IMAGE_WRONG_PLATFORM",
        "large": "IMAGE_TOO_LARGE",
        "lying": "IMAGE_UNUSABLE",
        "hostile": "IMAGE_UNUSABLE",
    }
    options = _options(running.host, most_image_bytes=2_500_000)
    async with _backend(folder, options, allowed_images=(f"{running.host}/*",)) as backend:
        found = {name: (await _refused(_create(backend, name, image=running.image(name)))).reason for name in reasons}
        assert found == reasons
        assert (await _refused(_create(backend, "x", image="elsewhere/x"))).reason == "IMAGE_NOT_ALLOWED"
        assert (await _refused(_create(backend, "x", image="No Image"))).reason == "FIELD_INVALID"
        # As if the paths were longer.
        monkeypatch.setattr(bases, "_MOST_OPTIONS", 100)
        layers = await _refused(_create(backend, "deep", image=running.image("deep")))
        assert layers.reason == "IMAGE_UNUSABLE" and "squash" in layers.message
    assert not list(folder.rglob("planted"))


async def test_a_closed_registry_wants_the_settings_credentials(folder: Path, tiny: bytes) -> None:
    async with registry(closed=True) as closed:
        headers = {"Authorization": aiohttp.encode_basic_auth(USER, PASSWORD)}
        await closed.push("private", [tiny], headers=headers)
        image = closed.image("private")
        async with _store(folder / "without", _options(closed.host)) as store:
            refused = await _refused(store.get(image))
            assert refused.reason == "IMAGE_UNAUTHORIZED" and "image_credentials" in refused.message
        for password, works in ((PASSWORD, True), ("wrong-secret", False)):
            given = RegistryOptions(
                credentials={closed.host: f"{USER}:{password}"}, plain_http=frozenset([closed.host])
            )
            assert password not in repr(given)
            async with _store(folder / password, ImageOptions(given)) as store:
                if works:
                    assert (await store.get(image)).layers
                else:
                    refused = await _refused(store.get(image))
                    assert refused.reason == "IMAGE_UNAUTHORIZED" and password not in str(refused)


# Faults ---------------------------------------------------------------------------------------------------------------

Fault = Callable[[web.Request, int], Awaitable[web.StreamResponse | None]]


@asynccontextmanager
async def _faulty(running: Registry, fault: Fault) -> AsyncIterator[str]:
    """A host in front of a registry; ``fault`` gets each request and how often it came, and may answer it instead."""
    asked = Counter[str]()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def serve(request: web.Request) -> web.StreamResponse:
            asked[request.path] += 1
            answered = await fault(request, asked[request.path])
            if answered is not None:
                return answered
            url = f"http://{running.host}{request.path_qs}"
            async with session.get(url, headers={"Accept": request.headers["Accept"]}) as answer:
                kind = answer.headers.get("Content-Type", "application/octet-stream")
                return web.Response(status=answer.status, body=await answer.read(), headers={"Content-Type": kind})

        app = web.Application()
        app.router.add_get("/{path:.*}", serve)
        async with serving(app) as url:
            yield url.removeprefix("http://")


async def test_what_passes_is_tried_again(folder: Path, running: Registry, tiny: bytes) -> None:
    await running.push("task", [tiny])

    async def fault(request: web.Request, time: int) -> web.StreamResponse | None:
        if time == 1:
            return web.Response(status=503)
        if time == 2:
            return web.Response(status=429, headers={"Retry-After": "0"})
        if time == 3 and "blobs" in request.path:
            # The connection ends within the blob.
            cut = web.StreamResponse(headers={"Content-Length": "100000"})
            await cut.prepare(request)
            await cut.write(b"x")
            assert request.transport is not None
            request.transport.close()
            return cut
        return None

    async with _faulty(running, fault) as host, _store(folder, _options(host)) as store:
        assert (await store.get(f"{host}/task:1")).layers


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "the registry sent 0"), (b"x" * 10_000_000, "sent more"), (None, "the registry sent sha256:")],
)
async def test_a_blob_that_is_not_what_its_digest_says_is_refused(
    folder: Path, running: Registry, tiny: bytes, body: bytes | None, message: str
) -> None:
    await running.push("task", [tiny])
    blob = gzip.compress(tiny, 1, mtime=0)

    async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
        if not request.path.endswith(digest(blob)):
            return None
        return web.Response(body=blob[:-1] + b"x" if body is None else body)

    async with _faulty(running, fault) as host, _store(folder, _options(host)) as store:
        refused = await _refused(store.get(f"{host}/task:1"))
        assert refused.reason == "IMAGE_PULL_FAILED" and message in refused.message
        assert not any(store.layers_folder.iterdir())


@pytest.mark.requirement("R142")
async def test_a_limit_of_the_registry_reaches_the_caller(folder: Path, running: Registry) -> None:
    async def fault(_: web.Request, __: int) -> web.StreamResponse | None:
        return web.Response(status=429, headers={"Retry-After": "1234"})

    async with _faulty(running, fault) as host, _store(folder, _options(host)) as store:
        refused = await _refused(store.get(f"{host}/task:1"))
        assert refused.reason == "IMAGE_RATE_LIMITED" and refused.retry_after_s == 1234


async def test_a_silent_registry_is_a_pull_timeout(folder: Path, running: Registry) -> None:
    async def fault(_: web.Request, __: int) -> web.StreamResponse | None:
        await asyncio.Event().wait()
        return None

    async with _faulty(running, fault) as host, _store(folder, _options(host, pull_timeout_s=0.2)) as store:
        assert (await _refused(store.get(f"{host}/task:1"))).reason == "IMAGE_PULL_TIMEOUT"


async def test_a_mirror_is_asked_first_and_the_registry_after_it(folder: Path, running: Registry, tiny: bytes) -> None:
    await running.push("here", [tiny])
    await running.push("library/there", [tiny])
    asked: list[str] = []

    async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
        asked.append(request.path)
        return web.Response(status=404) if "here/" in request.path and "there" not in request.path else None

    async with _faulty(running, fault) as mirror:
        mirrors = {running.host: f"http://{mirror}", "docker.io": f"http://{mirror}"}
        options = RegistryOptions(mirrors, plain_http=frozenset([running.host]))
        async with _store(folder, ImageOptions(options)) as store:
            assert (await store.get(running.image("here"))).layers
            assert (await store.get("there:1")).layers
    assert "/v2/here/manifests/1" in asked and "/v2/library/there/manifests/1" in asked


async def test_a_token_is_got_where_the_registry_says(folder: Path, running: Registry, tiny: bytes) -> None:
    await running.push("task", [tiny])
    tokens: list[tuple[str, str]] = []

    async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
        if request.path == "/token":
            tokens.append((request.query["scope"], request.headers.get("Authorization", "")))
            return web.json_response({"token": "given", "expires_in": 60})
        if request.headers.get("Authorization") != "Bearer given":
            realm = f'Bearer realm="http://{request.host}/token",service="s",scope="repository:task:pull"'
            return web.Response(status=401, headers={"WWW-Authenticate": realm})
        return None

    async with _faulty(running, fault) as host:
        options = RegistryOptions(credentials={host: "ada:secret"}, plain_http=frozenset([host]))
        async with _store(folder, ImageOptions(options)) as store:
            assert (await store.get(f"{host}/task:1")).layers
    assert tokens == [("repository:task:pull", aiohttp.encode_basic_auth("ada", "secret"))]


# The store ------------------------------------------------------------------------------------------------------------


async def test_a_redirect_takes_no_credential_along_and_leads_to_no_host_without_tls(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    await running.push("task", [tiny])
    taken = list[str]()

    async def elsewhere(request: web.Request, _: int) -> web.StreamResponse | None:
        taken.append(request.headers.get("Authorization", ""))
        return None

    async with _faulty(running, elsewhere) as other:

        async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
            if "Authorization" not in request.headers:
                return web.Response(status=401, headers={"WWW-Authenticate": "Basic realm=registry"})
            if "blobs" in request.path:
                return web.Response(status=307, headers={"Location": f"http://{other}{request.path_qs}"})
            return None

        async with _faulty(running, fault) as host:
            for name, hosts, reason in (("listed", (host, other), ""), ("other", (host,), "IMAGE_UNUSABLE")):
                taken.clear()
                options = RegistryOptions(credentials={host: f"{USER}:{PASSWORD}"}, plain_http=frozenset(hosts))
                async with _store(folder / name, ImageOptions(options)) as store:
                    if reason:
                        assert (await _refused(store.get(f"{host}/task:1"))).reason == reason
                        assert not taken
                    else:
                        assert (await store.get(f"{host}/task:1")).layers
                        assert set(taken) == {""}


async def test_an_image_survives_a_restart_and_is_not_pulled_again(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    await running.push("task", [tiny])
    options = _options(running.host, prefetch=(running.image("task"),))
    async with _store(folder, options) as store:
        await eventually(lambda: store.bytes > 0, "the image is prefetched")
    async with _store(folder, _options()) as store:
        assert (await store.get(running.image("task"))).layers


@pytest.mark.requirement("R142")
async def test_a_layer_that_sandboxes_may_use_is_neither_replaced_nor_got_again(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    """It is there while the image that brought it still comes; then another image with it is pulled."""
    tops = {name: layer([entry(name, name.encode())]) for name in ("one", "two")}
    for name, top in tops.items():
        await running.push(name, [tiny, top])
    blobs = {name: digest(gzip.compress(top, 1, mtime=0)) for name, top in tops.items()}
    base, name_of_base = digest(gzip.compress(tiny, 1, mtime=0)), digest(tiny).removeprefix("sha256:")[:40]
    asked, go_on = asyncio.Event(), {blob: asyncio.Event() for blob in blobs.values()}
    got = Counter[str]()

    async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
        blob = request.path.rpartition("/")[2]
        got[blob] += 1
        if got[base] > 1 or blob == blobs["two"]:
            asked.set()
        if blob in go_on:
            await go_on[blob].wait()
        return None

    async with _faulty(running, fault) as host, _store(folder, _options(host)) as store:
        one = asyncio.ensure_future(store.get(f"{host}/one:1"))
        shared = store.layers_folder / name_of_base / "fs"
        await eventually(shared.is_dir, "the shared layer is there")
        two = asyncio.ensure_future(store.get(f"{host}/two:1"))
        await asked.wait()
        go_on[blobs["one"]].set()
        first = await one
        mounted = os.open(store.folder(first.layers[0]), os.O_RDONLY | os.O_DIRECTORY)
        try:
            go_on[blobs["two"]].set()
            assert (await two).layers[0] == first.layers[0]
            assert os.path.samestat(os.fstat(mounted), shared.stat()) and any(shared.iterdir())
        finally:
            os.close(mounted)
        assert got[base] == 1


async def test_a_complete_layer_that_no_image_names_is_kept(folder: Path, running: Registry, tiny: bytes) -> None:
    """One that a failed pull left, if it could not be moved away."""
    await running.push("task", [tiny])
    async with _store(folder, _options(running.host)) as store:
        there = store.layers_folder / digest(tiny).removeprefix("sha256:")[:40] / "fs"
        there.mkdir(parents=True)
        before = there.stat()
        image = await store.get(running.image("task"))
        assert os.path.samestat(before, store.folder(image.layers[0]).stat())
    assert not any((folder / "images/drafts").iterdir())


async def test_a_layer_is_pulled_again_after_the_pull_that_brought_it_failed(
    folder: Path, running: Registry, tiny: bytes
) -> None:
    await running.push("task", [tiny, layer([entry("x", b"")])])
    top = digest(gzip.compress(layer([entry("x", b"")]), 1, mtime=0))
    fails = True

    async def fault(request: web.Request, _: int) -> web.StreamResponse | None:
        if request.path.endswith(top) and fails:
            await eventually(lambda: any(store.layers_folder.iterdir()), "the other layer is there")
            return web.Response(status=404)
        return None

    async with _faulty(running, fault) as host, _store(folder, _options(host)) as store:
        await _refused(store.get(f"{host}/task:1"))
        assert not any(store.layers_folder.iterdir())
        fails = False
        image = await store.get(f"{host}/task:1")
        assert all(any(store.folder(one).iterdir()) for one in image.layers)


async def test_the_least_recently_used_is_evicted_but_none_in_use(folder: Path, running: Registry) -> None:
    now = [0.0]
    for name in "abc":
        await running.push(name, [layer([entry(name, name.encode() * 1000)])])
    options = _options(running.host, most_bytes=12_000)
    async with _store(folder, options, clock=lambda: now[0]) as store:
        evicted: list[str] = []
        store.on_evicted = lambda image: evicted.append(image.id)
        held = await store.get(running.image("a"))
        newest = held
        for name in "bc":
            now[0] += 1000
            newest = await store.get(running.image(name))
            now[0] += 1000
            store.release(newest)
        # Three do not fit: the oldest is in use, and the newest was used just now.
        now[0] += 1000
        store.release(await store.get(running.image("c")))
        assert held.id not in evicted and len(evicted) == 1 and store.bytes == 2 * (1000 + 4096)
        assert store.folder(held.layers[0]).is_dir() and store.folder(newest.layers[0]).is_dir()


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from penstock_sandbox.backends.images.registry import RegistryOptions
from penstock_sandbox.backends.images.store import ImageOptions, ImageStore
folder, host, image, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def counted(call):
    def step(*arguments, **options):
        global steps
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return step
Path.rename, Path.mkdir, Path.write_text = map(counted, (Path.rename, Path.mkdir, Path.write_text))
import penstock_sandbox.backends.images.store as module
async def main():
    store = ImageStore(Path(folder) / "images", ImageOptions(RegistryOptions(plain_http=frozenset([host]))))
    await store.open()
    await store.get(image)
    await store.aclose()
asyncio.run(main())
"""


@pytest.mark.requirement("R142")
async def test_a_kill_at_any_write_leaves_nothing_half_there(folder: Path, running: Registry) -> None:
    contents = {"a": b"1" * 1000}
    await running.push("task", [layer([entry(name, content)]) for name, content in contents.items()])
    image = running.image("task")
    # The first few make the directories.
    for step in range(4, 100):
        place = folder / str(step)
        place.mkdir()
        argv = [sys.executable, "-c", _KILLED, str(place), running.host, image, str(step)]
        done = await asyncio.create_subprocess_exec(*argv)
        code = await done.wait()
        async with _store(place, ImageOptions(RegistryOptions(plain_http=frozenset([running.host])))) as store:
            assert not any((place / "images/drafts").iterdir())
            records = list((place / "images/images").iterdir())
            assert records or not any(store.layers_folder.iterdir())
            found = await store.get(image)
            for one, (name, content) in zip(found.layers, contents.items(), strict=True):
                assert (store.folder(one) / name).read_bytes() == content
        if code == 0:
            assert step > 8, "it was killed at several writes"
            return
        assert code == -signal.SIGKILL
    raise AssertionError("it never came to its end")
