"""What `make dist` builds, as those have it who get it from an index: metadata, licence, and a first rollout."""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from importlib import metadata as installed
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support import ruby
from tests.support.wheels import install

from clients import nodejs
from tools import dist as published
from tools import golang, names, sbom

pytestmark = pytest.mark.timeout(900)  # a guard: the first test of each fixture builds or installs

ROOT: Final = names.ROOT
LICENCE: Final = (ROOT / "LICENSE").read_bytes()
TASK: Final = ROOT / "examples" / "grpo" / "task.yaml"
MESSAGE: Final = ROOT / "examples" / "ruby" / "task.json"
"""A task of the demo in the JSON form of its message."""
MODELS: Final = published.MODEL.with_name("tiny-model-cache")
"""What the small model is taken from where it is not trained."""
KEPT_MODELS: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "tiny-model"
COUNT: Final = 2
"""Rollouts in each language."""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, limit: float = 560.0) -> str:
    """Runs a command that has to succeed; returns its output."""
    argv = [str(word) for word in command]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is published.

    Its small model is trained once a machine and version of what it is made from, of which its file's name is a digest.
    """
    folder = tmp_path_factory.mktemp("packages") / "dist"
    MODELS.mkdir(parents=True, exist_ok=True)
    for kept in KEPT_MODELS.glob("*.safetensors"):
        shutil.copyfile(kept, MODELS / kept.name)
    run(sys.executable, "-m", "tools.dist", folder)
    for made in MODELS.iterdir():
        if not (kept := KEPT_MODELS / made.name).exists():
            KEPT_MODELS.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(made, partial)
            partial.rename(kept)
    return folder


def wheels(dist: Path) -> list[Path]:
    """Returns the wheels."""
    return sorted(dist.glob("*.whl"))


def sources(dist: Path) -> list[Path]:
    """Returns the source archives of Python."""
    return sorted(dist.glob("*.tar.gz"))


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of an archive by name."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                yield name, opened.read(name)
        return
    with tarfile.open(archive) as opened_tar:
        for member in opened_tar.getmembers():
            if (stream := opened_tar.extractfile(member)) is not None:
                yield member.name, stream.read()


def metadata_of(archive: Path) -> Message:
    """Returns the metadata of a wheel or a source archive."""
    wanted = r"[^/]+\.dist-info/METADATA" if archive.suffix == ".whl" else r"[^/]+/PKG-INFO"
    (found,) = [content for name, content in files_of(archive) if re.fullmatch(wanted, name)]
    return email.message_from_bytes(found)


def links_lead_somewhere(text: str, inside: set[str]) -> None:
    """Checks a page's links: a URL, which if it is the repository's names a file of it, or a file of the archive."""
    base = f"{names.names()['repository']}/blob/main/"
    for target in re.findall(r"\]\(([^)#]*)", text):
        if target.startswith(base):
            assert (ROOT / target.removeprefix(base)).exists(), target
        elif target and "://" not in target:
            assert any(name.endswith(f"/{target}") for name in inside), f"{target} is not in the archive"


@pytest.mark.requirement("R116")
def test_each_wheel_and_source_archive_says_what_an_index_shows(dist: Path) -> None:
    """Licence text, authors, URLs, classifiers, keywords, a description whose links work; none is incomplete."""
    assert len(wheels(dist)) == len(sources(dist)) == len(names.PYTHON)
    for archive in (*wheels(dist), *sources(dist)):
        metadata, content = metadata_of(archive), dict(files_of(archive))
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Author"] == names.names()["authors"]
        assert LICENCE in [text for name, text in content.items() if name.endswith("/LICENSE")], archive.name
        assert metadata["License-File"] == "LICENSE"
        assert {"Homepage", "Documentation", "Repository", "Changelog", "Issues"} <= {
            item.partition(",")[0] for item in metadata.get_all("Project-URL", [])
        }
        assert metadata["Keywords"] and len(metadata.get_all("Classifier", [])) >= 8 and metadata["Summary"]
        links_lead_somewhere(str(metadata.get_payload()), set(content))
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels(dist), *sources(dist))


@pytest.mark.requirement("R116", "R144")
def test_wheel_and_source_archive_have_every_file_of_the_demo(dist: Path) -> None:
    """Of both of its agents, tasks too: they are no Python, and the demo reads them."""
    package = ROOT / "clients" / "python" / "demo" / "penstock_demo"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.*") if path.suffix != ".pyc"}
    assert {"penstock_demo/task.yaml", "penstock_demo/repairs/task.yaml", "penstock_demo/repairs/train.py"} <= files
    for archive in (*dist.glob("penstock_demo-*.whl"), *dist.glob("penstock_demo-*.tar.gz")):
        inside = {name.partition("/")[2] if archive.suffix == ".gz" else name for name, _ in files_of(archive)}
        assert files <= inside, archive.name


@pytest.mark.requirement("R116")
def test_the_npm_package_could_be_published_as_it_is(dist: Path, tmp_path: Path) -> None:
    """Licence, links, and dependencies that allow later versions; npm's own trial of a publication succeeds."""
    (archive,) = dist.glob("*.tgz")
    content = dict(files_of(archive))
    assert content["package/LICENSE"] == LICENCE
    links_lead_somewhere(content["package/README.md"].decode(), set(content))
    metadata = json.loads(content["package/package.json"])
    assert metadata["name"] == names.names()["npm"]
    assert metadata["author"] and metadata["keywords"] and metadata["repository"]["url"] == names.names()["repository"]
    assert all(version.startswith("^") for version in metadata["dependencies"].values())
    run("npm", "publish", "--dry-run", archive, cwd=tmp_path, env=nodejs.environment())


@pytest.mark.requirement("R116")
def test_sums_and_the_bill_of_materials_cover_every_archive(dist: Path) -> None:
    """Each archive has its SHA-256 in both; what ours needs is listed with versions."""
    sums = dict(line.split("  ")[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())
    archives = {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    assert set(sums) == archives
    for name, digest in sums.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    (bill,) = dist.glob("*.cdx.json")
    metadata = json.loads(bill.read_text())
    listed = {
        item["url"]: item["hashes"][0]["content"]
        for component in metadata["components"]
        for item in component.get("externalReferences", ())
    }
    assert listed == {name: sums[name] for name in archives - {bill.name}}
    assert len(listed) == sum(len(component.get("externalReferences", ())) for component in metadata["components"])
    known = {component["bom-ref"] for component in metadata["components"]}
    assert all({item["ref"], *item["dependsOn"]} <= known for item in metadata["dependencies"])
    assert {"grpcio", "jax", "@bufbuild/protobuf", "google.golang.org/grpc"} <= {
        component["name"] for component in metadata["components"]
    }


def needed(dist: Path, extra: str) -> set[str]:
    """What the client with an extra brings beside our wheels: by their metadata, and by that of what is installed.

    AssertionError where something has not the version that is asked for.
    """
    ours: dict[str, list[str]] = {}
    for text in map(metadata_of, wheels(dist)):
        ours[canonicalize_name(text["Name"])] = text.get_all("Requires-Dist", [])
    waiting, seen = [("penstock", extra)], set[tuple[str, str]]()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        lines = ours[name] if name in ours else installed.requires(name) or []
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                other = canonicalize_name(requirement.name)
                assert other in ours or requirement.specifier.contains(installed.version(other), prereleases=True), (
                    f"{name} needs {requirement}, and {installed.version(other)} is installed"
                )
                waiting += [(other, further) for further in ("", *requirement.extras)]
    return {name for name, _ in seen} - ours.keys()


def hiding(names: set[str]) -> str:
    """A module after whose import these are not installed."""
    return f"""
import sys
from importlib.machinery import PathFinder

class Shown(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {sorted(names)!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Shown
"""


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheels, in which those of the installed packages can be imported that they need.

    What they do not name is not there, as after `pip install penstock[local]`, which is a test on demand.
    """
    folder = tmp_path_factory.mktemp("environment")
    python = install(dist, folder)
    brought = needed(dist, "local")
    (packages,) = folder.glob("lib/python*/site-packages")
    hidden = {
        module
        for module, owners in installed.packages_distributions().items()
        if not brought.intersection(map(canonicalize_name, owners)) and not module.startswith("penstock")
    }
    # Not as `sitecustomize`: Debian's Python has one of its own, which comes first.
    (packages / "hidden_packages.py").write_text(hiding(hidden))
    (packages / "hidden_packages.pth").write_text("import hidden_packages\n")
    assert {"pytest", "mypy"} <= hidden and not {"grpc", "jax"} & hidden
    absent = [str(python), "-c", "import pytest"]
    assert subprocess.run(absent, capture_output=True, check=False).returncode, "what is not needed can be imported"
    return folder


@pytest.mark.requirement("R116")
@pytest.mark.on_demand("pip installs the wheels and all that they need from an index: their metadata are checked")
def test_pip_installs_wheels_and_what_they_need(dist: Path, tmp_path: Path) -> None:
    """Into an empty environment, where everything fits together."""
    run(sys.executable, "-m", "venv", tmp_path / "made")
    pip: list[str | Path] = [tmp_path / "made/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    local: list[str | Path] = [f"{path}[local]" if path.name.startswith("penstock-") else path for path in wheels(dist)]
    run(*pip, "install", "--no-compile", "-c", ROOT / "constraints.txt", *local, cwd=tmp_path)
    run(*pip, "check", cwd=tmp_path)
    run(tmp_path / "made/bin/penstock", "--help", cwd=tmp_path)


@pytest.fixture(scope="module")
def surroundings(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables of programs that find what `penstock up` started in an empty directory."""
    folder = tmp_path_factory.mktemp("empty")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "PYTHON", "XDG_"))}
    state = tmp_path_factory.mktemp("state")
    argv = [environment / "bin" / "penstock", "up", "--free-ports", "--json"]
    process = subprocess.Popen(
        [str(word) for word in argv],
        cwd=folder,
        env={**kept, "XDG_STATE_HOME": str(state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(state / "errors").open("w"),
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (state / "errors").read_text()
        started: dict[str, Any] = json.loads(line)
        assert all(started["services"].values()) and started["dashboard"]
        assert list(folder.iterdir()) == []
        yield {**kept, "PENSTOCK_CONNECTION": started["connection"]}
    finally:
        process.terminate()
        process.wait(60)


def rewarded(said: str) -> None:
    """Checks that a program printed a reward for each rollout, and that the small model solved one at least."""
    rewards = [float(number) for number in re.findall(r"reward (\d\.?\d*)", said)]
    assert len(rewards) == COUNT and set(rewards) <= {0.0, 0.3, 1.0} and max(rewards) == 1.0, said


PYTHON_TRAINER: Final = """
import asyncio, sys
from penstock.client import Task, connect

async def main():
    async with connect() as ps:
        group = await ps.groups.create(Task.load(sys.argv[1]), "shell", int(sys.argv[2]))
        async for call in group.calls():
            await call.deliver(await ps.inference.generate(call.prompt_token_ids, call.sampling))
        for result in await group.results():
            print("reward", result.reward.value)

asyncio.run(main())
"""


@pytest.mark.requirement("R116")
def test_python_gets_rewarded_rollouts_from_installed_wheels(
    environment: Path, surroundings: Mapping[str, str], tmp_path: Path
) -> None:
    """`penstock up` in an empty directory serves the small model; nothing of the checkout is used."""
    (tmp_path / "trainer.py").write_text(PYTHON_TRAINER)
    (task,) = environment.glob("lib/*/site-packages/penstock_demo/task.yaml")
    rewarded(run(environment / "bin" / "python", "trainer.py", task, str(COUNT), cwd=tmp_path, env=surroundings))
    places = "import penstock.client as a, penstock_driver as b, penstock_demo as c; print(a, b, c)"
    assert str(ROOT) not in run(environment / "bin" / "python", "-c", places, cwd=tmp_path, env=surroundings)


@pytest.mark.requirement("R116", "R144")
def test_the_demo_with_an_agent_from_pypi_is_there_from_installed_wheels(
    environment: Path, surroundings: Mapping[str, str], tmp_path: Path
) -> None:
    """Its program begins, and its task is one that a rollout takes; `make dist-check` trains a step."""
    penstock = environment / "bin" / "penstock"
    (task,) = environment.glob("lib/*/site-packages/penstock_demo/repairs/task.yaml")
    run(penstock, "tasks", "check", task, cwd=tmp_path, env=surroundings)
    assert "mini-swe-agent" in run(penstock, "demo", "--help", cwd=tmp_path, env=surroundings)
    place = "from penstock_demo.repairs import train; print(train.__file__)"
    assert str(ROOT) not in run(environment / "bin" / "python", "-c", place, cwd=tmp_path, env=surroundings)


TYPESCRIPT_TRAINER: Final = """
import { readFileSync } from "node:fs";
import { connect } from "PACKAGE";

const ps = connect();
const group = await ps.groups.create(JSON.parse(readFileSync("task.json", "utf8")), "shell", Number(process.argv[2]));
for await (const call of group.calls()) {
  const { sampling, rolloutId } = call;
  await call.deliver(await ps.inference.generate(call.promptTokenIds, { sampling, sessionId: rolloutId }));
}
for (const { outcome } of await group.results()) console.log("reward", outcome.reward?.value);
await ps.close();
"""


@pytest.mark.requirement("R116")
def test_typescript_gets_rewarded_rollouts_with_the_packed_client(
    dist: Path, surroundings: Mapping[str, str], tmp_path: Path
) -> None:
    """The tarball is installed into an empty folder, with what it needs from the registry."""
    (archive,) = dist.glob("*.tgz")
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    (tmp_path / "trainer.js").write_text(TYPESCRIPT_TRAINER.replace("PACKAGE", names.names()["npm"]))
    task = yaml.safe_load(TASK.read_text())
    files = {item["path"]: item["content"] for item in task["files"]}
    shown = {"taskId": task["task_id"], "instruction": task["instruction"], "files": files}
    (tmp_path / "task.json").write_text(json.dumps({**shown, "verifier": task["verifier"]}))
    prepared = {**surroundings, "PATH": nodejs.environment()["PATH"]}
    run("npm", "install", "--prefer-offline", "--no-audit", "--no-fund", archive, cwd=tmp_path, env=prepared)
    rewarded(run("node", "trainer.js", str(COUNT), cwd=tmp_path, env=prepared))


GO_TRAINER: Final = """package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"google.golang.org/protobuf/encoding/protojson"
	penstock "MODULE"
	driverv1 "MODULE/gen/driver/v1"
)

func main() {
	ctx := context.Background()
	ps, err := penstock.Connect()
	check(err)
	defer ps.Close()
	text, err := os.ReadFile("task.json")
	check(err)
	task := &driverv1.Task{}
	check(protojson.Unmarshal(text, task))
	spec := &driverv1.RolloutSpec{Agent: &driverv1.AgentChoice{Name: "shell"}, Task: task}
	group, err := ps.Groups.Create(ctx, spec, COUNT)
	check(err)
	for call, err := range group.Calls(ctx) {
		check(err)
		completion, err := ps.Inference.Generate(ctx, call.PromptTokenIDs(), call.Sampling(), call.RolloutID())
		check(err)
		check(call.Deliver(ctx, completion))
	}
	results, err := group.Results(ctx)
	check(err)
	for _, result := range results {
		reward, _ := result.Reward()
		fmt.Println("reward", reward)
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
"""


@pytest.mark.requirement("R116")
def test_go_gets_rewarded_rollouts_with_the_module_of_a_proxy(
    dist: Path, surroundings: Mapping[str, str], tmp_path: Path
) -> None:
    """`go` takes the zip as a module proxy serves it, verifies it, and builds a program of it."""
    module, version = names.names()["go"], f"v{sbom.version()}"
    served = tmp_path / "proxy" / module / "@v"
    served.mkdir(parents=True)
    (archive,) = dist.glob("penstock-go-*.zip")
    content = dict(files_of(archive))
    assert content[f"{module}@{version}/LICENSE"] == LICENCE
    links_lead_somewhere(content[f"{module}@{version}/README.md"].decode(), set(content))
    shutil.copyfile(archive, served / f"{version}.zip")
    (served / f"{version}.mod").write_bytes(content[f"{module}@{version}/go.mod"])
    (served / f"{version}.info").write_text(json.dumps({"Version": version}))
    program = tmp_path / "program"
    program.mkdir()
    details = "google.golang.org/genproto/googleapis/rpc"
    (program / "go.mod").write_text(
        f"module trainer\n\ngo 1.23\n\nrequire {module} {version}\n\n"
        f"replace {details} => {golang.HOME / 'error-details'}\n"
    )
    (program / "main.go").write_text(GO_TRAINER.replace("MODULE", module).replace("COUNT", str(COUNT)))
    shutil.copyfile(MESSAGE, program / "task.json")
    prepared = dict(golang.environment())
    proxies = f"{(tmp_path / 'proxy').as_uri()},{prepared['GOPROXY']}"
    prepared |= {"GOWORK": "off", "GOPROXY": proxies, "GOFLAGS": f"{prepared['GOFLAGS']} -mod=mod", "GONOSUMDB": "*"}
    prepared |= {**surroundings, "PATH": prepared["PATH"]}
    # Go keeps in its build cache which files a module has, by the module's place alone: another content, another place.
    prepared["GOMODCACHE"] = str(tmp_path / published.digest(archive))
    go = golang.HOME / "go" / "bin" / "go"
    run(go, "build", "-race", "-ldflags=-w", "-o", "trainer", ".", cwd=program, env=prepared)
    assert "all modules verified" in run(go, "mod", "verify", cwd=program, env=prepared)
    rewarded(run(program / "trainer", cwd=program, env=prepared))


@pytest.mark.requirement("R116")
def test_ruby_gets_rewarded_rollouts_with_stubs_of_the_published_protos(
    dist: Path, surroundings: Mapping[str, str], tmp_path: Path
) -> None:
    """The example needs nothing of ours but the archive of the protos and an address."""
    (archive,) = dist.glob("penstock-proto-files-*.zip")
    assert dict(files_of(archive))["LICENSE"] == LICENCE
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "published")
    stubs = ruby.stubs(tmp_path, tmp_path / "published" / "protos")
    program = shutil.copy(ROOT / "examples" / "ruby" / "trainer.rb", tmp_path)
    said = run("ruby", "-W0", f"-I{stubs}", program, MESSAGE, str(COUNT), cwd=tmp_path, env=surroundings)
    rewarded(said)


@pytest.mark.requirement("R116")
def test_the_client_alone_names_the_extra_that_brings_the_rest(dist: Path, tmp_path: Path) -> None:
    """With the wheels of the client and its stubs only, `up`, `serve` and `demo` say what to install."""
    for wheel in (*dist.glob("penstock-*.whl"), *dist.glob("penstock_protos-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "packages")
    # No editable install of a checkout: -S leaves site-packages out, whose third parties come back by their path.
    third = Path(yaml.__file__).parents[1]
    call = "from penstock.cli.main import app; app()"
    prepared = {**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}{os.pathsep}{third}"}
    for command in (["up", "--free-ports"], ["serve", "driver"], ["demo"]):
        argv = [sys.executable, "-S", "-c", call, *command]
        done = subprocess.run(argv, cwd=tmp_path, env=prepared, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode and "pip install 'penstock[local]'" in done.stderr, (command, done.stdout, done.stderr)
