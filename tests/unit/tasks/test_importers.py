"""Importers: what is carried over, what is refused by name, and what the graders make of pytest's words."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import foreign_tasks

from penstock.client import Command, ConfigurationError, CopiedPath, InvalidArgument, Limits, Resources, Task
from penstock.client.tasks.field_types import MAX_FILE_BYTES
from penstock.client.tasks.spec import McpServer, SandboxChoice
from penstock.client.tasks.yaml import YamlFile
from penstock.client.wire.specs import digest
from penstock.tasks import importers as package
from penstock.tasks.images import contexts_of, with_image
from penstock.tasks.importers import Choices, import_tasks
from penstock.tasks.importers.common import Folder, Refused
from penstock.tasks.importers.dockerfile import contents
from penstock.tasks.sets import load_tasks

COLLECT = "[verifier.environment]\n[[verifier.collect]]\ncommand = 'x'\n"
PROGRAMS = Path(package.__file__).parent / "programs"


def only(form: str, source: Path, destination: Path, choices: Choices | None = None) -> Task:
    """The one task of a source."""
    (found,) = import_tasks(form, source, destination, choices)
    assert found.folder is not None, found.problem
    return Task.load(found.folder)


def refusal(form: str, source: Path, destination: Path, choices: Choices | None = None) -> str:
    """Why the one task of a source is refused; nothing is left of it."""
    (found,) = import_tasks(form, source, destination, choices)
    assert found.folder is None
    assert list(destination.iterdir()) == []
    return found.problem


def test_a_harbor_task_keeps_its_image_its_limits_and_its_resources(tmp_path: Path) -> None:
    """Issue 6, point 6: times, sizes, root and metadata are what they were."""
    more = 'storage_mb = 1024\ndocker_image = "registry.example/sum:1"\n'
    more += 'env = { TOKEN = "${TOKEN}", LEVEL = "${LEVEL:-2}" }\n'
    foreign_tasks.harbor(tmp_path / "sum", more=more)
    task = only("harbor", tmp_path / "sum", tmp_path / "out", Choices(env={"TOKEN": "t"}))
    assert task.sandbox == SandboxChoice(
        image="registry.example/sum:1",
        user="root",
        resources=Resources(cpu=1.0, memory_bytes=512 << 20, disk_bytes=1 << 30),
    )
    assert task.limits == Limits(prepare=300.0, agent=90.0, verify=90.0)
    assert dict(task.env) == {"TOKEN": "t", "LEVEL": "2"}
    assert task.metadata["difficulty"] == "easy"
    assert task.verifier is not None
    assert {file.path for file in task.verifier.files} >= {"/tests/test.sh", "/tests/data/expected"}
    assert next(file.mode for file in task.verifier.files if file.path == "/tests/test.sh") == 0o755
    assert not [file.path for file in task.files], "neither tests nor solution are in the agent's sandbox"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("files", "more", "named"),
    [
        ({}, "gpus = 1\n", "gpus"),
        ({}, "healthcheck = { command = 'x' }\n", "healthcheck"),
        ({}, "env = { KEY = '${SECRET}' }\n", "--env SECRET=VALUE"),
        ({"environment/docker-compose.yaml": "services: {db: {build: db}}\n"}, "", "services.db.build"),
        ({}, "[steps]\nx = 1\n", "steps"),
        ({}, "os = 'windows'\n", "environment.os: windows"),
        ({}, "workdir = '/x'\ndocker_image = 'a:1'\n", "environment.workdir"),
        ({}, "mcp_servers = [{ name = 'x', url = 'http://x' }]\n", "environment.mcp_servers[0]: it must be a program"),
        ({}, "mcp_servers = [{ transport = 'stdio', command = 'x', cwd = '/' }]\n", "environment.mcp_servers[0]: cwd"),
        ({}, "mcp_servers = { x = 1 }\n", "environment.mcp_servers: it is not a list"),
        ({}, "mcp_servers = [{ name = 'penstock', transport = 'stdio', command = 'x' }]\n", "the gate's own server"),
        ({}, "[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect: it needs a separate verifier"),
        ({}, "[verifier.environment]\ngpus = 1\n", "verifier.environment.gpus"),
        ({}, "[verifier.environment]\nhealthcheck = { command = 'x' }\n", "verifier.environment: healthcheck"),
        ({}, "[verifier.environment]\nos = 'windows'\n", "verifier.environment.os: windows"),
        ({"tests/docker-compose.yaml": "x"}, "[verifier.environment]\n", "several containers of a verifier"),
        ({}, f"{COLLECT}service = 'db'\n", "verifier.collect[0].service: db"),
        ({}, f"{COLLECT}user = 'ada'\n", "verifier.collect[0].user: ada"),
        ({}, "workdir = '/app'\n[verifier.environment]\ncpus = 1\n", "verifier.environment.workdir: it is missing"),
        ({"tests/data/expected": "version https://git-lfs.github.com/spec/v1\noid x\n"}, "", "git lfs pull"),
        ({"task.toml": "= nonsense"}, "", "nvalid"),
    ],
)
def test_unsupported_wishes_of_a_harbor_task_are_refused_by_name(
    tmp_path: Path, files: dict[str, str], more: str, named: str
) -> None:
    """Nothing that would change what a task means is left out silently."""
    foreign_tasks.harbor(tmp_path / "sum", more=more)
    foreign_tasks.write(tmp_path / "sum", files)
    assert named in refusal("harbor", tmp_path / "sum", tmp_path / "out")


def test_a_harbor_task_of_schema_1_4_keeps_its_agent_directory_and_hosts(tmp_path: Path) -> None:
    """Issue 12, point 6: keys that are written empty say nothing; what cannot be kept is a note."""
    foreign_tasks.harbor(
        tmp_path / "sum",
        more=(
            "gpu_types = []\nos = 'linux'\nworkdir = '/app/data'\nnetwork_mode = 'allowlist'\n"
            "allowed_hosts = ['pypi.org', '*.pythonhosted.org']\n"
            "mcp_servers = [{ name = 'notes', transport = 'stdio', command = 'notes', args = ['--all'] }]\n"
        ),
    )
    config = tmp_path / "sum" / "task.toml"
    text = config.read_text().replace('version = "1.0"', 'schema_version = "1.4"\nartifacts = ["/app/x"]')
    config.write_text(text.replace("timeout_sec = 90.0", "timeout_sec = 90.0\nuser = 'builder'"))
    (found,) = import_tasks("terminal-bench-2", tmp_path / "sum", tmp_path / "out")
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.sandbox is not None and task.build is not None
    assert task.sandbox.agent_network is not None
    assert (task.sandbox.user, task.sandbox.agent_network.hosts) == ("builder", ["pypi.org", "*.pythonhosted.org"])
    assert task.mcp_servers == [McpServer(name="notes", args=["notes", "--all"])]
    assert (task.build / "Dockerfile").read_text().endswith("\nWORKDIR /app/data\n")
    assert {note.partition(":")[0] for note in found.notes} == {
        "agent.user",
        "artifacts",
        "the verifier's allowed_hosts are left out",
    }


def separate(folder: Path, artifacts: str, more: str = "[verifier.environment]\n") -> Path:
    """A Harbor task whose verifier is separate and gets these artifacts, as TOML."""
    foreign_tasks.harbor(folder, more=more)
    config = folder / "task.toml"
    config.write_text(f"artifacts = {artifacts}\n{config.read_text()}")
    return folder


def test_a_separate_verifier_of_harbor_has_its_image_its_resources_and_whole_artifacts(tmp_path: Path) -> None:
    """Issue 12, point 6: tests/Dockerfile makes its image, which has the tests; what it collects is collected."""
    folder = separate(
        tmp_path / "sum",
        '["/app/sum.txt", { source = "/app/out/", destination = "x", exclude = [".git", "*.py[co]"] }]',
        "env = { A = 'task' }\n[verifier.env]\nB = 'b'\n[verifier.environment]\ncpus = 2\nmemory_mb = 64\n"
        "workdir = '/judge'\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org']\n[verifier.environment.env]\n"
        "C = 'own'\n[[verifier.collect]]\ncommand = 'git diff > /app/sum.txt'\ntimeout_sec = 300\n",
    )
    foreign_tasks.write(folder, {"tests/Dockerfile": "FROM judge:1\nCOPY test.sh /tests/test.sh\n"})
    task = only("harbor", folder, tmp_path / "out")
    verifier = task.verifier
    assert verifier is not None and verifier.build is not None and task.build is not None
    assert (verifier.build / "Dockerfile").read_text().startswith("FROM judge:1")
    assert {file.path for file in verifier.files} == {"/tmp/penstock-grade/harbor.sh"}
    assert verifier.copies == [
        CopiedPath("/logs/artifacts"),
        CopiedPath("/app/sum.txt"),
        CopiedPath("/app/out", (".git", "*.py[co]")),
    ]
    assert verifier.collect == [
        Command(["bash", "-c", "git diff > /app/sum.txt"], env={"A": "task"}, timeout=300.0),
    ]
    assert (verifier.user, verifier.fresh_fork) == ("root", True)
    assert verifier.resources == Resources(cpu=2.0, memory_bytes=64 << 20)
    (command,) = verifier.commands
    assert (dict(command.env), command.cwd) == ({"B": "b", "C": "own"}, "/judge")
    assert task.sandbox is not None and task.sandbox.verifier_network is not None
    assert task.sandbox.verifier_network.hosts == ["pypi.org"] and task.sandbox.agent_network is None
    assert task.limits is not None and task.limits.verify == 300.0
    assert [str(line) for line in task.setup] == [
        "mkdir -p /logs/agent /logs/artifacts /logs/verifier && chmod 777 /logs/agent /logs/artifacts /logs/verifier"
    ]
    assert set(contexts_of(task).values()) == {task.build, verifier.build}
    ready = with_image(task)
    assert ready.verifier is not None and contexts_of(task)[ready.verifier.image] == verifier.build
    with pytest.raises(InvalidArgument, match="with_image") as caught:
        digest(task)
    assert caught.value.reason == "TASK_IMAGE"


@pytest.mark.parametrize(
    ("more", "image", "build", "has_tests"),
    [
        ("[verifier.environment]\ndocker_image = 'judge:1'\n", "judge:1", False, True),
        ("[verifier]\nenvironment_mode = 'separate'\nuser = 'ada'\n", "", True, False),
        ("docker_image = 'task:1'\n[verifier.environment]\n", "task:1", False, False),
    ],
)
def test_a_separate_verifiers_image_is_that_which_harbor_takes(
    tmp_path: Path, more: str, image: str, build: bool, has_tests: bool
) -> None:
    """Its own, else the agent's, into which the tests are put, and the files that Harbor puts there."""
    folder = separate(tmp_path / "sum", "[]")
    config = folder / "task.toml"
    text = config.read_text().replace("[verifier.environment]\n", "")
    if "[verifier]" in more:
        text = text.replace("[verifier]\n", more)
    else:
        text += more
    config.write_text(text)
    if image == "task:1":
        (folder / "environment" / "Dockerfile").unlink()
    task = only("harbor", folder, tmp_path / "out")
    verifier = task.verifier
    assert verifier is not None
    assert (verifier.image, verifier.build is not None) == (image, build)
    assert ("/tests/test.sh" in {file.path for file in verifier.files}) is not has_tests
    assert verifier.copies == [CopiedPath("/logs/artifacts")]
    assert verifier.user == ("ada" if build else "root") and verifier.commands[0].user == ""
    if build:
        ready = with_image(task)
        assert ready.sandbox is not None and ready.verifier is not None
        assert ready.verifier.image == ready.sandbox.image
    if image == "task:1":
        assert [file.path for file in task.files] == ["numbers.txt"]
        assert "numbers.txt" in {file.path for file in verifier.files}


@pytest.mark.parametrize(
    ("artifacts", "named"),
    [
        ('[{ source = "/x", service = "db" }]', "artifacts[0].service: db"),
        ('["x"]', "artifacts[0]: 'x' is no absolute path"),
        ('["/"]', "artifacts[0]: '/' is no absolute path"),
        ('["/proc/1"]', "artifacts[0]: '/proc/1' is no absolute path"),
        ('["/logs"]', "artifacts[0]: /logs has /logs/verifier"),
        ('[{ source = "/x", exclude = ["a/b"] }]', "artifacts[0].exclude: 'a/b'"),
        ('[{ source = "/x", exclude = ["a*b"] }]', "artifacts[0].exclude: 'a*b'"),
        ('["/x/y", "/x"]', "artifacts: /x/y and /x overlap"),
        ('["/x", { source = "/y", destination = "x/z" }]', "artifacts: /x and /y overlap"),
        ('[{ source = "/x", exclude = ["a"] }, "/x/y"]', "artifacts: /x and /x/y overlap"),
        ("[{ path = '/x' }]", "artifacts[0]: it is neither"),
    ],
)
def test_artifacts_that_a_separate_verifier_would_not_get_whole_are_refused(
    tmp_path: Path, artifacts: str, named: str
) -> None:
    assert named in refusal("harbor", separate(tmp_path / "sum", artifacts), tmp_path / "out")


def test_an_artifact_that_another_one_has_is_copied_once(tmp_path: Path) -> None:
    folder = separate(tmp_path / "sum", '["/x", "/x/y", "/logs/artifacts/z", "/logs/agent/a.json"]')
    (found,) = import_tasks("harbor", folder, tmp_path / "out")
    assert found.folder is not None, found.problem
    verifier = Task.load(found.folder).verifier
    assert verifier is not None
    assert [copied.path for copied in verifier.copies] == ["/logs/artifacts", "/x", "/logs/agent/a.json"]
    assert any(note.startswith("artifacts: /logs/agent/a.json: it has what the agent itself") for note in found.notes)


def test_a_separate_verifier_needs_images(tmp_path: Path) -> None:
    folder = separate(tmp_path / "sum", "[]")
    assert "import it with images" in refusal("harbor", folder, tmp_path / "out", Choices(image=False))


@pytest.mark.requirement("R75")
def test_a_link_that_leads_out_of_a_task_is_not_followed(tmp_path: Path) -> None:
    """R75's spirit: importing what others wrote reads nothing else of this machine."""
    foreign_tasks.harbor(tmp_path / "sum")
    (tmp_path / "sum" / "tests" / "passwd").symlink_to("/etc/passwd")
    assert "link" in refusal("harbor", tmp_path / "sum", tmp_path / "out")


@pytest.mark.requirement("R75")
@pytest.mark.parametrize("name", ["instruction.md", "tests", "solution", "environment"])
def test_no_part_of_a_task_is_itself_a_link(tmp_path: Path, name: str) -> None:
    """R75's spirit: what a stranger's task names is not the importer's own files."""
    foreign_tasks.harbor(tmp_path / "sum")
    part = tmp_path / "sum" / name
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    assert "link" in refusal("harbor", tmp_path / "sum", tmp_path / "out")


@pytest.mark.requirement("R63")
def test_a_task_of_the_wrong_form_is_refused_and_ends_no_other(tmp_path: Path) -> None:
    """Each by its own name, nothing half-made stays, and the rest is imported."""
    foreign_tasks.harbor(tmp_path / "all" / "a-bad")
    foreign_tasks.harbor(tmp_path / "all" / "b-good")
    config = tmp_path / "all" / "a-bad" / "task.toml"
    config.write_text(config.read_text().replace("[environment]", "[environment]\ncpus = 'two'"))
    bad, good = sorted(import_tasks("harbor", tmp_path / "all", tmp_path / "out"), key=lambda item: item.name)
    assert bad.problem and bad.folder is None and good.folder is not None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b-good"]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("seconds", "size", "named"),
    [("900000.0", 1, "limits.agent: "), ("90.0", MAX_FILE_BYTES + 1, "verifier.files")],
    ids=["a time limit", "a file"],
)
def test_a_task_that_penstock_could_not_load_is_refused_and_the_others_load(
    tmp_path: Path, seconds: str, size: int, named: str
) -> None:
    """One such task would make every later use of the directory fail."""
    foreign_tasks.harbor(tmp_path / "all" / "a-bad")
    foreign_tasks.harbor(tmp_path / "all" / "b-good")
    config = tmp_path / "all" / "a-bad" / "task.toml"
    config.write_text(config.read_text().replace("timeout_sec = 90.0", f"timeout_sec = {seconds}"))
    with (tmp_path / "all" / "a-bad" / "tests" / "data" / "big").open("wb") as file:
        file.truncate(size)
    bad, good = sorted(import_tasks("harbor", tmp_path / "all", tmp_path / "out"), key=lambda item: item.name)
    assert bad.folder is None and named in bad.problem and ".partial" not in bad.problem
    assert good.folder is not None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b-good"]
    assert [task.task_id for task in load_tasks(tmp_path / "out").tasks] == ["b-good"]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task.yaml": "instruction: x\nparser_name: swelancer\n"}, "parser_name swelancer"),
        ({"task.yaml": "instruction: x\nrun_tests_in_same_shell: true\n"}, "run_tests_in_same_shell"),
        ({"task.yaml": "descriptions: []\n"}, "no instruction"),
    ],
)
def test_unsupported_wishes_of_a_terminal_bench_task_are_refused_by_name(
    tmp_path: Path, change: dict[str, str], named: str
) -> None:
    """As above."""
    foreign_tasks.terminal_bench(tmp_path / "sum")
    foreign_tasks.write(tmp_path / "sum", change)
    assert named in refusal("terminal-bench", tmp_path / "sum", tmp_path / "out")


@pytest.mark.parametrize("form", ["harbor", "terminal-bench"])
def test_only_the_chosen_tasks_of_a_directory_are_imported(tmp_path: Path, form: str) -> None:
    """The others are neither written nor refused."""
    make = {"harbor": foreign_tasks.harbor, "terminal-bench": foreign_tasks.terminal_bench}[form]
    for name in ("sum", "total"):
        make(tmp_path / "tasks" / name)
    (found,) = import_tasks(form, tmp_path / "tasks", tmp_path / "out", Choices(only=["su*"]))
    assert found.name == "sum" and [path.name for path in (tmp_path / "out").iterdir()] == ["sum"]


@pytest.mark.parametrize(("form", "usual"), [("harbor", "/solution"), ("terminal-bench", "/oracle")])
def test_a_solution_is_where_the_user_that_runs_it_may_write(tmp_path: Path, form: str, usual: str) -> None:
    """It is written by the agent, and only root writes to `/`; without an image, the root is the sandbox's own."""
    {"harbor": foreign_tasks.harbor, "terminal-bench": foreign_tasks.terminal_bench}[form](tmp_path / "sum")
    for name, choices, place in (
        ("root", Choices(), usual),
        ("agent", Choices(user="agent"), f"/tmp{usual}"),
        ("image", Choices(user=""), f"/tmp{usual}"),
        ("none", Choices(image=False), usual),
    ):
        task = only(form, tmp_path / "sum", tmp_path / name, choices)
        assert task.solution is not None
        (file,) = task.solution.files
        assert file.path.rpartition("/")[0] == place
        assert list(task.solution.commands[0].argv) == ["bash", file.path]


@pytest.mark.requirement("R75")
def test_neither_tests_nor_solution_come_into_a_terminal_bench_task_s_image(tmp_path: Path) -> None:
    """The form keeps its build context beside them."""
    foreign_tasks.terminal_bench(tmp_path / "sum")
    task = only("terminal-bench", tmp_path / "sum", tmp_path / "out")
    assert task.build is not None
    assert {path.name for path in task.build.iterdir()} == {"Dockerfile", "numbers.txt"}
    assert task.solution is not None
    assert [file.path for file in task.solution.files] == ["/oracle/solution.sh"]


def test_scripts_that_install_from_the_network_are_listed(tmp_path: Path) -> None:
    """Issue 6, point 6: a verifier has no network, and such a test would never have one pass."""
    foreign_tasks.harbor(tmp_path / "sum")
    foreign_tasks.write(tmp_path / "sum", {"tests/test.sh": "apt-get update\ncurl -LsSf https://astral.sh/uv | sh\n"})
    (found,) = import_tasks("harbor", tmp_path / "sum", tmp_path / "out")
    assert any("test.sh seems to install" in note for note in found.notes)


@pytest.mark.requirement("R54")
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("RUN make", "RUN"),
        ("COPY --from=x a b", "--from"),
        ("COPY absent /", "not exist"),
        ("COPY ../x /", "outside"),
        ("WORKDIR $HOME/app", "WORKDIR with a variable, which needs an image"),
        ("ENV PATH=/opt/bin:$PATH", "ENV with a variable, which needs an image"),
        ("ENV A=1 \\\n  B=${A}", "ENV with a variable"),
        ("COPY x ${PLACE}/", "COPY with a variable"),
        ("ADD $FILE /", "ADD with a variable"),
        ("COPY --chmod=755 x /", "--chmod=755, which needs an image"),
        ("COPY --chown=a --chmod=755 x /", "--chmod=755, which needs an image"),
        ("ADD old.tar.gz /srv", "old.tar.gz, which is unpacked, which needs an image"),
        ("ADD old.* /srv/", "old.tar.gz, which is unpacked"),
        ("ADD unnamed /srv", "unnamed, which is unpacked"),
        ("ADD data.tar.zst /srv", "data.tar.zst, which is unpacked"),
    ],
)
def test_an_importer_without_images_refuses_dockerfiles_that_do_more_than_copy(
    tmp_path: Path, line: str, named: str
) -> None:
    """No silent downgrade to a sandbox that lacks what the image has."""
    (tmp_path / "x").write_text("x")
    context = foreign_tasks.write(tmp_path / "context", {"Dockerfile": f"FROM a\n{line}\n", "x": "x"})
    with tarfile.open(context / "old.tar.gz", "w:gz") as compressed, tarfile.open(context / "unnamed", "w") as archive:
        compressed.add(tmp_path / "x", "x")
        archive.add(tmp_path / "x", "x")
    (context / "data.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(Refused, match=re.escape(named)):
        contents(context)


def test_an_importer_without_images_puts_copies_where_docker_does(tmp_path: Path) -> None:
    """Issue 6, point 6: relative and absolute targets, directories, several sources, lines that go on."""
    context = foreign_tasks.write(
        tmp_path,
        {
            "Dockerfile": (
                "# comment\nFROM a AS b\nWORKDIR /app\nWORKDIR sub\nENV A=1 \\\n    B='two words'\nENV C three words\n"
                "COPY a.txt ./\nCOPY a.txt renamed.txt\nCOPY data /data\nADD a.gz /\nCOPY old.tar /\n"
                'COPY ["a.txt", "b.txt", "/both/"]\nCMD ["x"]\n'
            ),
            "a.txt": "a",
            "b.txt": "b",
            "data/c.txt": "c",
        },
    )
    # Only ADD unpacks, and only what is an archive.
    (context / "a.gz").write_bytes(gzip.compress(b"no archive"))
    with tarfile.open(context / "old.tar", "w") as archive:
        archive.add(context / "a.txt", "a.txt")
    found = contents(context)
    assert found.workdir == "/app/sub"
    assert found.env == {"A": "1", "B": "two words", "C": "three words"}
    assert [(path.name, place) for path, place in found.copies] == [
        ("a.txt", "/app/sub/a.txt"),
        ("a.txt", "/app/sub/renamed.txt"),
        ("data", "/data"),
        ("a.gz", "/a.gz"),
        ("old.tar", "/old.tar"),
        ("a.txt", "/both/a.txt"),
        ("b.txt", "/both/b.txt"),
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "[oops"}, "neither a list"),
        ({"FAIL_TO_PASS": '"test_a"'}, "neither a list"),
        ({"FAIL_TO_PASS": {"test_a": 1}}, "neither a list"),
        ({"FAIL_TO_PASS": ["test_a (mod.Case)"]}, "not a test of pytest"),
        ({"problem_statement": ""}, "no problem_statement"),
        ({"problem_statement": "half a pair: \ud83d"}, "unexpected form"),
        ({"test_patch": "diff --git a/../x b/../x\n"}, "leads out"),
        ({"image": ""}, "names no image"),
    ],
)
def test_a_record_that_cannot_be_graded_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Issue 6, point 6: nothing is guessed of a record."""
    (tmp_path / "r.jsonl").write_text(json.dumps(foreign_tasks.record("abc", **{"image": "i", **change})))
    assert named in refusal("swe", tmp_path / "r.jsonl", tmp_path / "out")


def test_records_come_as_lines_as_a_list_and_as_parquet(tmp_path: Path) -> None:
    """Issue 6, point 6: whatever holds the records, they become the same task."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    record = foreign_tasks.record("abc", image="i", FAIL_TO_PASS=["tests/test_sums.py::TestAdd::test_add[up]"])
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "r.json").write_text(json.dumps([record]))
    parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "r.parquet")
    tasks = [only("swe", tmp_path / f"r.{kind}", tmp_path / kind) for kind in ("jsonl", "json", "parquet")]
    assert tasks[0] == tasks[1] == tasks[2]
    assert tasks[0].sandbox == SandboxChoice(image="i", user="root")
    assert tasks[0].task_id == "kiwi__sums-1"


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\x0b", "\x1e"])
def test_a_text_of_a_record_may_have_any_line_end(tmp_path: Path, end: str) -> None:
    """Issue 7, point 21: JSON Lines end with a line feed alone; the others made the whole file unreadable."""
    said = f"before{end}after"
    record = foreign_tasks.record("abc", image="i", problem_statement="MARK")
    text = json.dumps(record, ensure_ascii=False).replace("MARK", said if end > "\x1f" else json.dumps(said)[1:-1])
    (tmp_path / "r.jsonl").write_text(f"{text}\r\n\n{text.replace('kiwi__sums-1', 'other')}", encoding="utf-8")
    found = list(import_tasks("swe", tmp_path / "r.jsonl", tmp_path / "out"))
    assert [one.problem for one in found] == ["", ""]
    assert {Task.load(one.folder).instruction for one in found if one.folder is not None} == {said}


@given(
    st.text(
        st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\x85\u2028\r\n\t :#'\"|")), min_size=1
    ).filter(
        lambda text: text.strip()  # a task says what is to be done
    )
)
def test_an_imported_text_is_read_back_unchanged(text: str) -> None:
    """Issue 7, point 21: a line end of Unicode's became a space in the instruction of an imported task."""
    with tempfile.TemporaryDirectory() as place:
        folder = Folder(Path(place), "t")
        (made,) = [folder.filled(lambda: folder.content.update(instruction=text))]
        assert made.folder is not None
        assert YamlFile(made.folder / "task.yaml").content["instruction"] == text


@pytest.mark.requirement("R48")
def test_an_importer_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing optional package is a named error."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "r.parquet").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"penstock\[parquet\]"):
        import_tasks("swe", tmp_path / "r.parquet", tmp_path / "out")


def test_missing_format_missing_source_and_taken_place_are_typed_errors(tmp_path: Path) -> None:
    """Issue 6, point 6: nothing of a person's is overwritten."""
    foreign_tasks.harbor(tmp_path / "sum")
    with pytest.raises(InvalidArgument, match="formats: harbor, terminal-bench, terminal-bench-2, swe, swe-bench"):
        import_tasks("inspect", tmp_path, tmp_path / "out")
    with pytest.raises(InvalidArgument, match="there is no"):
        import_tasks("harbor", tmp_path / "absent", tmp_path / "out")
    with pytest.raises(InvalidArgument, match="no task in the format"):
        import_tasks("harbor", tmp_path / "sum" / "tests", tmp_path / "out")
    import_tasks("harbor", tmp_path / "sum", tmp_path / "out")
    with pytest.raises(InvalidArgument, match="exists"):
        import_tasks("harbor", tmp_path / "sum", tmp_path / "out")


# The graders themselves ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grader() -> ModuleType:
    """The program that grades records, as a module."""
    described = importlib.util.spec_from_file_location("swe_grade", PROGRAMS / "swe_grade.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


REPORT = """<testsuites><testsuite>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x.TestOne.TestIn" name="test_b[1]"/>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x" name="test_c"><failure>no</failure></testcase>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x" name="test_d"><skipped/></testcase>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x" name="test_e[with blank]"/>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x" name="test_f"/>
<testcase file="tests/a/test_x.py" classname="tests.a.test_x" name="test_f"><error>teardown</error></testcase>
<testcase classname="" name="tests/broken.py"><error>collection</error></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        ("tests/a/test_x.py::TestOne::TestIn::test_b[1]", "passed"),
        ("tests/a/test_x.py::TestOne::TestIn::test_b", "passed"),
        ("tests/a/test_x.py::test_c", "failure"),
        ("tests/a/test_x.py::test_d", "skipped"),
        ("tests/a/test_x.py::test_e[with", "passed"),
        ("tests/a/test_x.py::test_f", "error"),
        ("test_c", "failure"),
        ("tests/a/test_x.py::test_absent", "absent"),
        ("tests/broken.py::test_z", "absent"),
    ],
)
def test_each_test_of_a_record_is_found_in_pytest_s_report(
    grader: ModuleType, tmp_path: Path, wanted: str, outcome: str
) -> None:
    """Issue 6, point 6: node ids are made of what the report says, names cut at a blank are recognised."""
    (tmp_path / "report.xml").write_text(REPORT)
    assert grader.outcome_of(wanted, grader.results(str(tmp_path / "report.xml"))) == outcome


def test_an_inherited_test_is_found_in_the_file_that_it_was_collected_from(
    grader: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest reports the file where its function is written; two classes may inherit it."""
    for name in ("tests/base.py", "tests/test_a.py", "tests/test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    cases = "".join(
        f'<testcase file="tests/base.py" classname="tests.test_{name}.TestAll" name="test_f">{body}</testcase>'
        for name, body in (("a", ""), ("b", "<failure/>"))
    )
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert grader.results("report.xml") == {
        "tests/test_a.py::TestAll::test_f": "passed",
        "tests/test_b.py::TestAll::test_f": "failure",
    }


@pytest.mark.parametrize(
    "patch",
    [
        "diff --git a/tests/test_old.py b/tests/test_new.py\nsimilarity index 90%\nrename from tests/test_old.py\n"
        "rename to tests/test_new.py\n",
        "diff --git a/tests/test_old.py b/tests/test_old.py\ndeleted file mode 100644\n--- a/tests/test_old.py\n"
        "+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n",
    ],
)
def test_a_file_that_the_test_patch_removes_is_not_given_to_pytest(tmp_path: Path, patch: str) -> None:
    """It runs nothing at all if a file of its command line is not there."""
    record = foreign_tasks.record("abc", image="i", test_patch=patch, FAIL_TO_PASS='["tests/test_new.py::test_x"]')
    (tmp_path / "r.jsonl").write_text(json.dumps({**record, "PASS_TO_PASS": "[]"}))
    import_tasks("swe", tmp_path / "r.jsonl", tmp_path / "out", Choices(history=True))
    (grading,) = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("grading.json")]
    assert grading["test_files"] == ["tests/test_new.py"]
    assert "tests/test_old.py" in grading["changed_files"]


_NAMES = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6)


@given(_NAMES, _NAMES, st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["passed", "failure", "skipped"])))
def test_record_is_resolved_exactly_when_all_its_tests_are(
    grader: ModuleType, fail: list[str], keep: list[str], outcomes: dict[str, str]
) -> None:
    """Issue 6, point 6: all or nothing in binary, the share of tests as a fraction, both within 0 and 1."""
    fail = fail or ["a"]
    found = {f"t.py::{name}": outcome for name, outcome in outcomes.items()}
    task = {
        "fail_to_pass": [f"t.py::{name}" for name in fail],
        "pass_to_pass": [f"t.py::{name}" for name in keep],
        "reward": "binary",
    }
    good = [outcomes.get(name) == "passed" for name in fail]
    good += [outcomes.get(name) in ("passed", "skipped") for name in keep]
    assert grader.judge(task, found)["reward"] == float(all(good))
    assert grader.judge({**task, "reward": "fraction"}, found)["reward"] == pytest.approx(sum(good) / len(good))


def graded(tmp_path: Path, files: dict[str, str], how: str, **variables: str) -> dict[str, Any] | None:
    """What the program for Terminal-Bench makes of what a task's run-tests.sh prints; None without a reward."""
    tests = tmp_path / "tests"
    foreign_tasks.write(tests, files)
    # The program as it is, but for the place of /tests.
    program = (PROGRAMS / "terminal_bench.sh").read_text().replace("/tests", str(tests))
    foreign_tasks.write(tmp_path / "grade", {"terminal_bench.sh": program, "manifest": "\n".join([*files, ""])})
    environment = {**os.environ, "PENSTOCK_REWARD_FILE": str(tmp_path / "reward"), **variables}
    argv = ["sh", str(tmp_path / "grade" / "terminal_bench.sh"), how]
    subprocess.run(argv, env=environment, check=True, capture_output=True)
    written = (tmp_path / "reward").read_text()
    return json.loads(written) if written else None


HEAD = "=========== short test summary info ============"


@pytest.mark.requirement("R74")
@pytest.mark.parametrize(
    ("said", "how", "reward"),
    [
        (f"{HEAD}\nPASSED a\nPASSED b\n===== 2 passed in 0.12s =====\n", "binary", (1.0, 2, 0)),
        (f"{HEAD}\nPASSED a\nFAILED b - x\n=== 1 failed, 1 passed in 61.00s (0:01:01) ===\n", "binary", (0.0, 1, 1)),
        (f"{HEAD}\nPASSED a\nERROR b - x\n== 1 passed, 2 warnings, 1 error in 0.1 seconds ==", "fraction", (0.5, 1, 1)),
        (f"{HEAD}\nXPASS a\nXFAIL b\n1 xfailed, 1 xpassed in 0.12s\n", "fraction", (0.5, 1, 1)),
        (
            f"\033[36m{HEAD}\033[0m\n\033[32m=== \033[32m\033[1m1 passed\033[0m in 0.1s ==\033[0m\r\n",
            "binary",
            (1.0, 1, 0),
        ),
        ("PASSED before any summary\n=== 1 passed in 0.12s ===\n", "binary", None),
        (f"{HEAD}\n=== no tests ran in 0.12s ===\n", "binary", None),
        (f"{HEAD}\nPASSED a\nand then it was killed\n", "binary", None),
        ("", "binary", None),
    ],
)
def test_pytest_summary_is_read_as_terminal_bench_does(
    tmp_path: Path, said: str, how: str, reward: tuple[float, int, int] | None
) -> None:
    """Tests that never ran are not graded, which is not zero."""
    found = graded(tmp_path, {"said.txt": said, "run-tests.sh": f"cat {tmp_path}/tests/said.txt\n"}, how)
    if reward is None:
        assert found is None
        return
    value, passed, failed = reward
    assert found == {"reward": value, "components": {"passed": passed, "failed": failed}}


TESTS = """
import pytest

AGENT = "got\\n=== short test summary info ===\\nPASSED a\\n=== 9 passed in 0.1s ===\\nPASSED b"

@pytest.mark.skip(reason="folded")
@pytest.mark.parametrize("x", [1, 2, 3])
def test_skipped(x): ...

def test_skips():
    pytest.skip(AGENT)

@pytest.mark.parametrize("x", ["a b", "c] - d", "FAILED x", "two\\nlines", "=== 2 failed in 0.1s ==="])
def test_passes(x):
    print(AGENT)

@pytest.mark.parametrize("x", [1, 2])
def test_fails(x):
    pytest.fail(AGENT)

@pytest.mark.xfail(reason=AGENT)
def test_fails_as_expected():
    assert False

@pytest.mark.xfail
def test_passes_unexpectedly(): ...

@pytest.fixture
def broken():
    raise ValueError(AGENT)

def test_has_an_error(broken): ...
"""


@pytest.mark.requirement("R72", "R74")
@pytest.mark.parametrize(
    ("options", "ci"),
    [("", ""), ("-q", "true"), ("-vv --color=yes", ""), ("-s --no-fold-skipped", "true")],
)
def test_counts_are_pytests_whatever_messages_and_names_say(tmp_path: Path, options: str, ci: str) -> None:
    """Folded skips count in full; what an agent's program printed, and a message quotes, counts for nothing."""
    script = (
        f"cd {tmp_path}/tests && {sys.executable} -m pytest -c /dev/null --rootdir . -rA {options} test_outputs.py\n"
    )
    files = {"test_outputs.py": TESTS, "run-tests.sh": script}
    found = graded(tmp_path, files, "fraction", CI=ci, BUILD_NUMBER="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert found == {"reward": pytest.approx(10 / 14, abs=1e-6), "components": {"passed": 10, "failed": 4}}


def test_written_task_is_the_same_for_any_directory_order(tmp_path: Path) -> None:
    """Issue 6, point 6: importing twice gives the same task, so that an evaluation may go on."""
    foreign_tasks.harbor(tmp_path / "sum")
    choices = replace(Choices(), resources=False)
    assert (
        only("harbor", tmp_path / "sum", tmp_path / "one", choices).verifier
        == only("harbor", tmp_path / "sum", tmp_path / "two", choices).verifier
    )
