"""Compose files of other people's tasks: what becomes of their services, and what is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import foreign_tasks

from penstock.client import Companion, HealthCheck, InvalidArgument, McpServer, Resources, Task
from penstock.client.rollouts.client import sandbox_of
from penstock.tasks.images import contexts_of, with_image
from penstock.tasks.importers import Choices, Imported, import_tasks

FILE = """
x-common: ignored
services:
  client:
    build: {context: ., dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [sh, -c, sleep infinity]
    environment: [TEST_DIR=$T_BENCH_TEST_DIR, "DATABASE=postgres://my_db/app"]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
    depends_on: {my_db: {condition: service_healthy}}
  web:
    image: nginx:${NGINX:-1.27}
    entrypoint: /entry --fast
    depends_on: [my_db, client]
    deploy: {resources: {limits: {cpus: "0.5", memory: 256M}}}
    ports: ["8080:80"]
    working_dir: /srv
    restart: always
  my_db:
    image: postgres:16
    container_name: database
    command: postgres -c 'fsync=off'
    user: postgres
    environment: {POSTGRES_PASSWORD: "pa$$word", POSTGRES_DB: null}
    volumes: [data:/var/lib/postgresql/data]
    networks: {default: {aliases: [store]}}
    healthcheck: {test: [CMD-SHELL, "pg_isready -U $${POSTGRES_USER}"], interval: 1m30s, timeout: 500ms, retries: 7}
    mem_limit: 1g
    pids_limit: 100
    expose: ["5432"]
volumes: {data: {}}
"""


def imported(folder: Path, file: str, choices: Choices | None = None) -> Imported:
    """A Terminal-Bench task with this compose file."""
    foreign_tasks.terminal_bench(folder / "sum")
    foreign_tasks.write(folder / "sum", {"docker-compose.yaml": file})
    (found,) = import_tasks("terminal-bench", folder / "sum", folder / "out", choices or Choices())
    return found


ALONE = """
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    command: [sh, -c, sleep infinity]
    environment: [TEST_DIR=$T_BENCH_TEST_DIR, MODE=fast]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
"""


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("image", [True, False])
def test_the_agents_service_alone_keeps_its_variables(tmp_path: Path, image: bool) -> None:
    """With companions or without, the agent and the tests have them."""
    found = imported(tmp_path, ALONE, Choices(image=image))
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.env["MODE"] == "fast" and "TEST_DIR" not in task.env
    assert task.verifier is not None and task.verifier.commands[0].env["MODE"] == "fast"
    assert task.sandbox is None or not task.sandbox.companions


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("privileged: true", "services.client: privileged"),
        ("cap_add: [NET_ADMIN]", "services.client: cap_add"),
        ("command: [sh, -c, 'nginx && sleep infinity']", "services.client.command"),
        ('environment: ["KEY=${SECRET}"]', "--env SECRET=VALUE"),
    ],
)
def test_what_the_agents_service_alone_cannot_have_is_refused(tmp_path: Path, line: str, named: str) -> None:
    """Without it, the task would be another one."""
    found = imported(tmp_path, f"services:\n  client:\n    build: .\n    {line}\n")
    assert found.folder is None and named in found.problem


@pytest.mark.requirement("R63")
def test_services_beside_the_agents_become_companions(tmp_path: Path) -> None:
    """Issue 12, point 6: in the order of their starts, with all that their entries say."""
    found = imported(tmp_path, FILE, Choices(env={"POSTGRES_DB": "app"}))
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.sandbox is not None
    assert task.sandbox.companions == (
        Companion(
            name="my-db",
            image="postgres:16",
            aliases=("my_db", "database", "store", "client"),
            command=("postgres", "-c", "fsync=off"),
            env={"POSTGRES_PASSWORD": "pa$word", "POSTGRES_DB": "app"},
            user="postgres",
            health_check=HealthCheck(
                argv=("/bin/sh", "-c", "pg_isready -U ${POSTGRES_USER}"), interval=90.0, timeout=0.5, retries=7
            ),
            resources=Resources(memory_bytes=1 << 30, pids=100),
        ),
        Companion(
            name="web",
            image="nginx:1.27",
            entrypoint=("/entry", "--fast"),
            workdir="/srv",
            resources=Resources(cpu=0.5, memory_bytes=256 << 20),
            after=("my-db",),
        ),
    )
    assert task.env == {"DATABASE": "postgres://my_db/app"}
    assert task.verifier is not None and task.verifier.fresh_fork is True
    assert task.verifier.changes_below == ["/app"]
    assert [note for note in found.notes if note.startswith("restart:")]


def test_a_harbor_task_may_leave_its_own_container_out(tmp_path: Path) -> None:
    """Harbor merges the file with its own, which has it."""
    foreign_tasks.harbor(tmp_path / "sum")
    compose = "services:\n  cache:\n    image: redis\n    healthcheck: {disable: true}\n"
    foreign_tasks.write(tmp_path / "sum", {"environment/docker-compose.yaml": compose})
    (found,) = import_tasks("harbor", tmp_path / "sum", tmp_path / "out", Choices())
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.sandbox is not None
    cache = Companion(name="cache", image="redis", aliases=("main",), health_check=HealthCheck())
    assert task.sandbox.companions == (cache,)


@pytest.mark.requirement("R72")
@pytest.mark.parametrize(
    ("files", "where"),
    [
        ({}, ""),
        ({"tests/test_it.py": "open('/app/sub/x'); get('http://db:1/rows'); get(f'{URL}/rows'); 1 / 2"}, ""),
        ({"tests/it.sh": "#!/usr/bin/env bash\n. $HOME/.local/bin/env\ncat ~/x /dev/null >/logs/verifier/x"}, "~/"),
        ({"tests/test_it.py": "open('/app/../etc/hosts')"}, "/etc/hosts"),
        ({"tests/test_it.py": "assert Path('/opt/tool').exists()"}, "/opt/tool"),
        ({"tests/deep/test_it.py": "open(Path.home() / 'x')"}, "Path.home"),
        ({"tests/test_it.py": "open('/application/x')"}, "/application/x"),
        ({"tests/data.bin": "\0 /tmp/x"}, "/tmp/x"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\nFROM b\n"}, "working directory"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR $HOME\n"}, "working directory"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /usr/src/app\n"}, "working directory"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\nWORKDIR sub\n"}, "/app/numbers.txt"),
    ],
)
def test_a_task_with_companions_is_graded_in_a_fork_unless_its_tests_name_what_that_lacks(
    tmp_path: Path, files: dict[str, str], where: str
) -> None:
    """In place, code that the agent left in a companion could forge the reward; a fork has the working directory."""
    foreign_tasks.harbor(tmp_path / "sum")
    more = {"tests/test.sh": "#!/bin/bash\ncat /app/numbers.txt\n"} if where == "/app/numbers.txt" else {}
    foreign_tasks.write(
        tmp_path / "sum", {"environment/docker-compose.yaml": "services: {db: {image: b}}", **more, **files}
    )
    (found,) = import_tasks("harbor", tmp_path / "sum", tmp_path / "out", Choices())
    assert found.folder is not None, found.problem
    verifier = Task.load(found.folder).verifier
    assert verifier is not None
    (note,) = (note for note in found.notes if note.startswith("fresh_fork:"))
    if where:
        assert verifier.fresh_fork is False and not verifier.changes_below
        assert "can forge a reward" in note and where in note
    else:
        assert verifier.fresh_fork is True and verifier.changes_below == ["/app"]


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("name", ["docker-compose.yml", "compose.yaml", "compose.yml"])
def test_a_compose_file_of_another_name_is_material_of_the_task(tmp_path: Path, name: str) -> None:
    """Harbor looks for one name; tasks whose agents mend compose files have others, with whatever mistakes."""
    foreign_tasks.harbor(tmp_path / "sum")
    foreign_tasks.write(tmp_path / "sum", {f"environment/{name}": "services: {db: {privileged: true}}\n"})
    (found,) = import_tasks("harbor", tmp_path / "sum", tmp_path / "out", Choices())
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.sandbox is None or not task.sandbox.companions
    assert task.build is not None and (task.build / name).is_file()


@pytest.mark.requirement("R63")
def test_an_mcp_server_of_harbor_in_a_companion_is_one_of_the_task(tmp_path: Path) -> None:
    """By the name of its service, whose host is the sandbox's own; no other address is reached."""
    compose = "services:\n  my_tools: {image: tools}\n"
    server = "mcp_servers = [{ name = 'tools', transport = 'streamable-http', url = 'http://HOST:8000/mcp' }]\n"
    for host, problem in (("my_tools", ""), ("main", "it must be a program"), ("example.com", "it must be a program")):
        foreign_tasks.harbor(tmp_path / host, more=server.replace("HOST", host))
        foreign_tasks.write(tmp_path / host, {"environment/docker-compose.yaml": compose})
        (found,) = import_tasks("harbor", tmp_path / host, tmp_path / "out", Choices())
        assert problem in (found.problem or "")
        if not problem:
            assert found.folder is not None, found.problem
            assert Task.load(found.folder).mcp_servers == [
                McpServer(name="tools", args=[], url="http://my_tools:8000/mcp")
            ]


@pytest.mark.requirement("R63")
def test_the_image_of_a_companion_is_built_from_its_dockerfile(tmp_path: Path) -> None:
    """Issue 12, point 6: named after its content, as the agent's is, so that a rollout needs it built first."""
    foreign_tasks.terminal_bench(tmp_path / "sum")
    compose = "services:\n  client: {build: .}\n  my_db: {build: {context: ./db}, image: ignored}\n"
    foreign_tasks.write(
        tmp_path / "sum", {"docker-compose.yaml": compose, "db/Dockerfile": "FROM debian\nCOPY data /data\n"}
    )
    foreign_tasks.write(tmp_path / "sum", {"db/data": "1"})
    (found,) = import_tasks("terminal-bench", tmp_path / "sum", tmp_path / "out", Choices())
    assert found.folder is not None, found.problem
    task = Task.load(found.folder)
    assert task.sandbox is not None
    assert task.sandbox.companions == (Companion(name="my-db", image="", aliases=("my_db", "client")),)
    assert task.companion_builds == {"my-db": found.folder / "companion-my-db"}
    with pytest.raises(InvalidArgument) as refused:
        sandbox_of(replace(task, build=None), None)
    assert refused.value.reason == "TASK_IMAGE"
    built = with_image(task)
    assert built.sandbox is not None
    assert contexts_of(task)[built.sandbox.companions[0].image] == found.folder / "companion-my-db"
    sandbox_of(built, None)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("service", "named"),
    [
        ("{build: ./db}", "services.db.build: ./db has no Dockerfile"),
        ("{build: .}", "services.db.build: .: its Dockerfile must be in a directory of its own"),
        ("{build: ../db}", "services.db.build: ../db: its Dockerfile must be"),
        ("{build: {context: db, target: x}}", "services.db.build: target"),
        ("{build: {context: db, dockerfile: Other}}", "services.db.build: Other"),
        ("{}", "services.db.image: is required"),
        ("{image: a, privileged: true}", "services.db: privileged"),
        ("{image: a, volumes: ['./init.sql:/init.sql']}", "services.db.volumes: ./init.sql"),
        ("{image: a, volumes: ['shared:/data']}\n  other: {image: b, volumes: ['shared:/data']}", "share no files"),
        ("{image: a, networks: [front, back]}", "networks: back, front"),
        ("{image: a, expose: [80]}\n  other: {image: b, ports: ['8080:80']}", "db listens on port 80 too"),
        ("{image: a, depends_on: [other]}\n  other: {image: b, depends_on: [db]}", "depend on each other"),
        ("{image: a, depends_on: {client: {condition: service_healthy}}}", "depends_on.client: service_healthy"),
        ("{image: a, depends_on: {o: {condition: service_completed_successfully}}}", "service_completed_successfully"),
        ("{image: 'a:$TAG'}", "needs the variable TAG"),
        ("{image: 'a:${TAG:?no}'}", "${TAG:?no} is not supported"),
        ("{image: a, healthcheck: {test: [SHELL, x]}}", "services.db.healthcheck.test"),
        ("{image: a, healthcheck: {test: x, interval: soon}}", "soon is not a time"),
        ("{image: a, healthcheck: {test: x, retries: 0}}", "retries"),
        ("{image: a, mem_limit: much}", "much is not an amount"),
        (f"{{image: a, mem_limit: 1{'0' * 400}g}}", "is too large an amount"),
        ("{image: a, pids_limit: many}", "many is not a number"),
        ("{image: a, deploy: {replicas: 3}}", "services.db.deploy.replicas: 3"),
        (
            "{image: a, deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}}",
            "reservations: devices",
        ),
        ("{image: a}\nnetworks: {default: {driver: host}}", "networks.default.driver: host"),
        ("{image: a}\n" + "".join(f"  d{i}: {{image: a}}\n" for i in range(8)), "10 services: a sandbox has at most 8"),
    ],
)
def test_what_a_companion_cannot_keep_is_refused_by_name(tmp_path: Path, service: str, named: str) -> None:
    """Nothing that would change what a task means is left out silently."""
    assert named in imported(tmp_path, f"services:\n  client: {{build: .}}\n  db: {service}\n").problem


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("service", "named"),
    [
        ("{build: ./other}", "services.client.build: ./other"),
        ("{build: {context: ., args: {A: b}}}", "services.client.build: args"),
        ("{build: {context: ., dockerfile: Other}}", "only Dockerfile is read"),
        ("{image: debian}", "services.client.image: debian"),
        ("{build: ., command: service start}", "services.client.command: service start"),
        ("{build: ., volumes: ['data:/data']}", "services.client.volumes: data"),
        ("{build: ., cap_add: [SYS_ADMIN]}", "services.client: cap_add"),
    ],
)
def test_what_is_beyond_the_agents_sandbox_is_refused_by_name(tmp_path: Path, service: str, named: str) -> None:
    """As above."""
    assert named in imported(tmp_path, f"services:\n  client: {service}\n  db: {{image: a}}\n").problem


def test_companions_need_images(tmp_path: Path) -> None:
    """Where files take the place of the image, nothing takes that of the companions."""
    file = "services:\n  client: {build: .}\n  db: {image: a}\n"
    assert "import it with images" in imported(tmp_path, file, Choices(image=False)).problem
