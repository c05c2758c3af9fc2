"""Builds kube-apiserver and kube-controller-manager 1.20.2 from Debian's source package, and keeps them.

No package of them exists where this project is built, and the source package has everything that they are made of. Go
1.19, etcd and one newer library come from the same release of Debian, unpacked and not installed. It takes a quarter of
an hour of one processor, once, and 4 GB while it goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SUITE: Final = "bookworm"
VERSION: Final = "v1.20.2"
PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager")
HOME: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / f"kubernetes-{VERSION}"
"""Where the programs are kept, for all checkouts."""

_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PACKAGES: Final = ("golang-1.19-go", "golang-1.19-src", "etcd-server", "golang-github-modern-go-reflect2-dev")
# With Go 1.19 the vendored one crashes the server at the first custom resource.
_REFLECT: Final = "github.com/modern-go/reflect2"
_MARKS: Final = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


def programs() -> Path:
    """Returns the folder of PROGRAMS.

    Raises:
        SystemExit: they are not built; says what to do.
    """
    if not all((HOME / name).exists() for name in PROGRAMS):
        sys.exit("The API server is not built here: run `python -m tests.kubernetes build` (half an hour, once)")
    return HOME


def build() -> None:
    """Brings what is missing of PROGRAMS.

    Raises:
        SystemExit: a step failed; its own output is above.
    """
    if all((HOME / name).exists() for name in PROGRAMS):
        return
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kubernetes-", dir=HOME) as temporary:
        scratch = Path(temporary)
        _download(scratch)
        debian = scratch / "debian"
        for package in scratch.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(debian)], scratch)
        tree = scratch / "go" / "src" / "k8s.io" / "kubernetes"
        tree.mkdir(parents=True)
        (source,) = scratch.glob("kubernetes_*.orig.tar.*")
        _run(["tar", "--extract", "--strip-components=1", f"--file={source}", f"--directory={tree}"], scratch)
        shutil.rmtree(tree / "vendor" / _REFLECT)
        shutil.copytree(debian / "usr/share/gocode/src" / _REFLECT, tree / "vendor" / _REFLECT)
        shutil.copy2(debian / "usr/bin/etcd", HOME / "etcd")
        go = _environment(scratch, debian / "usr/lib/go-1.19")
        _openapi(scratch, tree, go)
        for program in PROGRAMS[1:]:
            made = scratch / program
            _run(["go", "build", "-ldflags", _marks(), "-o", str(made), f"./cmd/{program}"], tree, go)
            made.rename(HOME / program)


def _download(folder: Path) -> None:
    """The sources and packages, by apt in a root of its own: it touches nothing else here and need not be root."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None or not _KEYRING.exists():
        sys.exit(f"The sources of Kubernetes come from Debian {SUITE}: this machine has no apt-get, or no {_KEYRING}")
    fields = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Identifier: Packages"]
    listed = subprocess.run(fields, capture_output=True, text=True, check=False).stdout.splitlines()
    known = [uri for origin, _, uri in (line.partition(" ") for line in listed) if origin == "Debian"]
    if not known:
        sys.exit("apt knows no repository of Debian here (was `apt-get update` ever run?)")
    repository = sorted(known, key=lambda uri: "security" in uri)[0]
    root = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "etc"):
        (root / part).mkdir(parents=True)
    (root / "status").touch()
    places = [f"{kind} [signed-by={_KEYRING}] {repository} {SUITE} main" for kind in ("deb", "deb-src")]
    (root / "etc" / "sources.list").write_text("\n".join(places) + "\n", "utf-8")
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
    options = [f"-o{key}={value}" for key, value in settings.items()]
    for words in (["update", "--error-on=any"], ["source", "--download-only", "kubernetes"], ["download", *_PACKAGES]):
        _run(["apt-get", "--quiet=2", *options, *words], folder)


def _environment(scratch: Path, toolchain: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GO", "CGO_"))}
    return {
        **kept,
        "PATH": f"{toolchain / 'bin'}{os.pathsep}{kept.get('PATH', '')}",
        "GOROOT": str(toolchain),
        "GOPATH": str(scratch / "go"),
        "GOCACHE": str(scratch / "cache"),
        "GOENV": "off",
        "GO111MODULE": "off",  # as Kubernetes builds itself from its vendored sources
        "GOFLAGS": f"-trimpath -p={os.environ.get('JOBS', '1')}",
        "CGO_ENABLED": "0",
    }


def _openapi(scratch: Path, tree: Path, go: dict[str, str]) -> None:
    """Generates what the source package leaves to the build: the descriptions of all types."""
    generator = scratch / "openapi-gen"
    _run(["go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], tree, go)
    marked = ["grep", "-rl", "--include=*.go", "+k8s:openapi-gen=", "pkg", "staging/src/k8s.io", "cmd", "plugin"]
    found = subprocess.run(marked, cwd=tree, capture_output=True, text=True, check=True).stdout.split()
    left_out = ("code-generator/", "sample-apiserver/", "/testdata/", "_test.go")
    folders = {str(Path(name).parent) for name in found if not any(part in name for part in left_out)}
    inputs = [f"k8s.io/kubernetes/{name.replace('staging/src/', 'vendor/')}" for name in sorted(folders)]
    command = [str(generator), "--logtostderr", "-i", ",".join(inputs), "-p", "k8s.io/kubernetes/pkg/generated/openapi"]
    command += ["-O", "zz_generated.openapi", "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt"]
    command += ["-r", str(scratch / "violations"), "--output-base", str(scratch / "go" / "src")]
    _run(command, tree, go)


def _marks() -> str:
    """Link options by which the programs know their version, which Helm asks for."""
    major, minor, _ = VERSION.removeprefix("v").split(".")
    told = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive"}
    places = [place for mark in _MARKS for place in (mark, f"k8s.io/kubernetes/vendor/{mark}")]
    return " ".join(["-s -w", *(f"-X {place}.{key}={value}" for place in places for key, value in told.items())])


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    path = None if environment is None else environment["PATH"]
    program = shutil.which(command[0], path=path) or command[0]
    print(f"== {Path(program).name} {' '.join(command[1:])[:100]}", flush=True)
    if subprocess.run([program, *command[1:]], cwd=folder, env=environment, check=False).returncode:
        sys.exit(f"{Path(program).name} failed (above)")
