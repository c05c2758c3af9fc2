"""Tasks in the forms of others, made by hand: Harbor's, Terminal-Bench's, SWE-style records with their repository."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from pathlib import Path

DOCKERFILE = 'FROM {image}\nWORKDIR /app\nCOPY numbers.txt ./\nENV GREETING="good day"\n'
FAKE_PYTEST = """#!/bin/sh
# What pytest -rA prints for two tests, of which one looks at what the agent made.
echo "=========================== short test summary info ============================"
echo "PASSED ../tests/test_outputs.py::test_always"
if [ "$(cat /app/sum.txt 2>/dev/null)" = 6 ]; then
    echo "PASSED ../tests/test_outputs.py::test_sum"
    echo "============================== 2 passed in 0.01s ==============================="
else
    echo "FAILED ../tests/test_outputs.py::test_sum - AssertionError"
    echo "========================= 1 failed, 1 passed in 0.01s =========================="
fi
"""
SUM = "tr '\\n' ' ' </app/numbers.txt | awk '{ print $1 + $2 + $3 }' >/app/sum.txt\n"


STORE = """
import http.server as h
class Store(h.BaseHTTPRequestHandler):
    kept = b""
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(Store.kept)
    def do_PUT(self):
        Store.kept = self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
h.HTTPServer(("", 8000), Store).serve_forever()
"""
ASK_STORE = 'import urllib.request as r; r.urlopen("http://127.0.0.1:8000")'


def write(folder: Path, files: dict[str, str]) -> Path:
    """Files by name; those that end in .sh may be executed."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        file.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder


def harbor(folder: Path, *, image: str = "debian:12", reward: str = "txt", more: str = "") -> Path:
    """A Harbor task: the sum of three numbers; its verifier writes reward.txt, or reward.json with components."""
    give = (
        'echo "$worth" > /logs/verifier/reward.txt'
        if reward == "txt"
        else """printf '{"reward": %s, "tidy": 0.5}' "$worth" > /logs/verifier/reward.json"""
    )
    return write(
        folder,
        {
            "task.toml": (
                'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60.0\n'
                "[agent]\ntimeout_sec = 90.0\n[environment]\nbuild_timeout_sec = 300.0\ncpus = 1\nmemory_mb = 512\n"
                + more
            ),
            "instruction.md": "Write the sum of the numbers in /app/numbers.txt to /app/sum.txt.\n",
            "environment/Dockerfile": DOCKERFILE.format(image=image),
            "environment/numbers.txt": "1\n2\n3\n",
            "tests/test.sh": (
                "#!/bin/bash\n[ ! -e /tests/planted ] || exit 3\n"
                'worth=0\nif [ "$(cat /app/sum.txt)" = "$(cat "$(dirname "$0")/data/expected")" ]; then worth=1; fi\n'
                f"{give}\n"
            ),
            "tests/data/expected": "6\n",
            "solution/solve.sh": "#!/bin/bash\n" + SUM,
        },
    )


def stored(folder: Path, *, image: str) -> Path:
    """A Harbor task with two containers: the number is to be put into a store, which is beside the agent."""
    ask = (
        "python3 -c 'import urllib.request as r; print(r.urlopen(r.Request(\"http://store:8000\"{})).read().decode())'"
    )
    put, got = ask.format(', b"6", method="PUT"'), ask.format("")
    compose = {
        "services": {
            "main": {"build": ".", "depends_on": {"store": {"condition": "service_healthy"}}},
            "store": {
                "image": image,
                "command": ["python3", "-c", STORE],
                "healthcheck": {"test": ["CMD", "python3", "-c", ASK_STORE], "interval": "1s", "retries": 60},
            },
        }
    }
    return write(
        harbor(folder, image=image, more=f'docker_image = "{image}"\n'),
        {
            "instruction.md": "Put the number 6 into the store at http://store:8000.\n",
            "environment/docker-compose.yaml": json.dumps(compose),
            "tests/test.sh": (
                f'#!/bin/bash\nworth=0\n[ "$({got})" = 6 ] && worth=1\necho "$worth" > /logs/verifier/reward.txt\n'
            ),
            "solution/solve.sh": f"#!/bin/bash\n{put}\n",
        },
    )


DATABASE = """FROM {image}
RUN install -d -o postgres -g postgres /data
COPY start.sh /start.sh
USER postgres
HEALTHCHECK --interval=1s --timeout=10s --retries=120 CMD {psql} -h 127.0.0.1 -U postgres -c "TABLE numbers"
ENTRYPOINT ["/start.sh"]
"""
START_DATABASE = """#!/bin/bash
set -e
programs=$(echo /usr/lib/postgresql/*/bin)
"$programs/initdb" --pgdata /data/own --auth trust --locale C.UTF-8 --no-sync
echo "CREATE TABLE numbers (number int);" | "$programs/postgres" --single -D /data/own postgres
exec "$programs/postgres" -D /data/own -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off
"""


def database(folder: Path, *, image: str) -> Path:
    """A Harbor task with a PostgreSQL beside the agent, in an image of its own that is built: a row is to be inserted.

    `image` has the programs of PostgreSQL, for the agent too.
    """
    psql = "/usr/lib/postgresql/*/bin/psql"
    services = {"main": {"build": ".", "depends_on": {"db": {"condition": "service_healthy"}}}, "db": {"build": "./db"}}
    ask = f'{psql} -h db -U postgres -At -c "SELECT sum(number) FROM numbers"'
    return write(
        harbor(folder, image=image, more=f'docker_image = "{image}"\n'),
        {
            "instruction.md": "Insert the number 6 into the table numbers of the database at db:5432.\n",
            "environment/docker-compose.yaml": json.dumps({"services": services}),
            "environment/db/Dockerfile": DATABASE.format(image=image, psql=psql),
            "environment/db/start.sh": START_DATABASE,
            "tests/test.sh": (
                f'#!/bin/bash\nworth=0\n[ "$({ask})" = 6 ] && worth=1\necho "$worth" > /logs/verifier/reward.txt\n'
            ),
            "solution/solve.sh": f'#!/bin/bash\n{psql} -h db -U postgres -c "INSERT INTO numbers VALUES (6)"\n',
        },
    )


def harbor_separate(folder: Path, *, image: str) -> Path:
    """The same with a separate verifier, whose own image has the tests: it gets artifacts, and what a hook collects."""
    harbor(folder, image=image, more="[verifier.environment]\nmemory_mb = 256\n" + _HOOK)
    config = folder / "task.toml"
    artifacts = 'artifacts = ["/app/sum.txt", { source = "/opt/kept", exclude = ["*.log"] }]\n'
    config.write_text(artifacts + config.read_text())
    return write(
        folder,
        {
            "environment/Dockerfile": DOCKERFILE.format(image=image) + "RUN mkdir /opt/kept && echo 6 >/opt/kept/six\n",
            "tests/Dockerfile": f"FROM {image}\nCOPY . /tests\nRUN mkdir /opt/kept && touch /opt/kept/own /opt/mine\n",
            "tests/test.sh": (
                "#!/bin/bash\n"
                # Nothing else of the agent's sandbox is there, and of its own image what no artifact replaces.
                '[ ! -e /app/numbers.txt ] && [ -e /opt/mine ] && [ "$(ls /opt/kept)" = six ] || exit 3\n'
                'worth=0\nif [ "$(cat /app/sum.txt)$(cat /logs/artifacts/again)" = 66 ]; then worth=1; fi\n'
                "echo 0.5 > /logs/verifier/reward.txt\n"
                'printf \'{"reward": %s}\' "$worth" > /logs/verifier/reward.json\n'
            ),
        },
    )


_HOOK = (
    "[[verifier.collect]]\ncommand = 'cat sum.txt > /logs/artifacts/again; touch /opt/kept/x.log'\ntimeout_sec = 20\n"
)


def terminal_bench(folder: Path) -> Path:
    """The same task in Terminal-Bench's first form."""
    return write(
        folder,
        {
            "task.yaml": (
                "instruction: |-\n  Write the sum of the numbers in /app/numbers.txt to /app/sum.txt.\n"
                "difficulty: easy\ncategory: maths\ntags: [sums]\nparser_name: pytest\n"
                "max_agent_timeout_sec: 90.0\nmax_test_timeout_sec: 60.0\n"
            ),
            "Dockerfile": DOCKERFILE.format(image="debian:12"),
            "numbers.txt": "1\n2\n3\n",
            "docker-compose.yaml": "services:\n  client:\n    build: {context: .}\n",
            "run-tests.sh": 'sh "$TEST_DIR/pytest.sh"\n',
            "tests/pytest.sh": FAKE_PYTEST,
            "solution.sh": SUM,
        },
    )


REPOSITORY = {
    "pyproject.toml": '[project]\nname = "sums"\nversion = "1"\n',
    "sums.py": "def add(first, second):\n    return first - second\n\n\ndef negate(value):\n    return -value\n",
    "tests/test_sums.py": "from sums import negate\n\n\ndef test_negate():\n    assert negate(2) == -2\n",
}
HIDDEN_TESTS = """import pytest

from sums import add, negate


def test_negate():
    assert negate(2) == -2


class TestAdd:
    @pytest.mark.parametrize("pair", [(1, 2), (2, 1)], ids=["up", "down hill"])
    def test_add(self, pair):
        assert add(*pair) == 3
"""


def patch(name: str, after: str) -> str:
    """What `git diff` says of a file of the repository that becomes `after`."""
    before = REPOSITORY[name].splitlines(keepends=True)
    changes = difflib.unified_diff(before, after.splitlines(keepends=True), f"a/{name}", f"b/{name}")
    return f"diff --git a/{name} b/{name}\n{''.join(changes)}"


GOLD_PATCH = patch("sums.py", REPOSITORY["sums.py"].replace("first - second", "first + second"))
TEST_PATCH = patch("tests/test_sums.py", HIDDEN_TESTS)


def repository(folder: Path, *, at_base: bool = False) -> str:
    """A clone with a commit after the one that matters; the id of that one, which `at_base` checks out."""
    write(folder, REPOSITORY)
    _git(folder, "init", "-q", "-b", "main")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "Sums")
    base = _git(folder, "rev-parse", "HEAD").strip()
    write(folder, {"sums.py": REPOSITORY["sums.py"].replace("first - second", "first + second")})
    _git(folder, "commit", "-q", "-a", "-m", "Adds what should be added: from the future")
    if at_base:
        _git(folder, "checkout", "-q", base)
    return base


def record(base: str, **changes: object) -> dict[str, object]:
    """A SWE-style record of that repository."""
    return {
        "instance_id": "kiwi__sums-1",
        "repo": "kiwi/sums",
        "base_commit": base,
        "problem_statement": "add(1, 2) gives -1.\n",
        "patch": GOLD_PATCH,
        "test_patch": TEST_PATCH,
        # As such records have them: JSON in a text, names cut at the first space.
        "FAIL_TO_PASS": json.dumps(
            ["tests/test_sums.py::TestAdd::test_add[up]", "tests/test_sums.py::TestAdd::test_add[down"]
        ),
        "PASS_TO_PASS": json.dumps(["tests/test_sums.py::test_negate"]),
        **changes,
    }


def smith_record(**changes: object) -> dict[str, object]:
    """A record of SWE-smith: its patch breaks what works in that repository."""
    return {
        "instance_id": "kiwi__sums.0badc0de.lm_rewrite__1",
        "repo": "swesmith/kiwi__sums.0badc0de",
        "image_name": "penstock-test/kiwi_1776_sums-1:1",
        "problem_statement": "negate(2) gives 2.\n",
        "patch": patch("sums.py", REPOSITORY["sums.py"].replace("-value", "value")),
        "FAIL_TO_PASS": ["tests/test_sums.py::test_negate"],
        "PASS_TO_PASS": ["tests/test_elsewhere.py::test_other"],
        **changes,
    }


R2E_TESTS = """from sums import add, negate


def test_add():
    assert add(1, 2) == 3


def test_wrong():
    assert negate(1) == 1
"""


def r2e_record(**changes: object) -> dict[str, object]:
    """A record of R2E-Gym: tests and commit are in it; one test fails before the commit and after it."""
    change = {
        "header": {"file": {"path": "sums.py"}},
        "old_file_content": REPOSITORY["sums.py"],
        "new_file_content": REPOSITORY["sums.py"].replace("first - second", "first + second"),
    }
    return {
        "repo_name": "sums",
        "docker_image": "penstock-test/kiwi_1776_sums-1:1",
        "commit_hash": "0123456789abcdef0123456789abcdef01234567",
        "problem_statement": "[ISSUE]\nadd(1, 2) gives -1.\n[/ISSUE]",
        "expected_output_json": json.dumps({"test_add": "PASSED", "\x1b[1mtest_wrong - assert\x1b[0m": "FAILED"}),
        "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [R2E_TESTS]}),
        "parsed_commit_content": json.dumps(
            {"file_diffs": [change, {**change, "header": {"file": {"path": "tests/test_sums.py"}}}]}
        ),
        **changes,
    }


def rebench_record(**changes: object) -> dict[str, object]:
    """A record of SWE-rebench-V2."""
    return {
        **record("abc"),
        "image_name": "docker.io/swerebenchv2/kiwi-sums:1-abc",
        "language": "python",
        "install_config": {
            "test_cmd": ["export PYTHONDONTWRITEBYTECODE=1", "pytest --no-header -rA --tb=line --color=no"],
            "log_parser": "parse_log_pytest",
            "install": ["pip install -e ."],
        },
        **changes,
    }


def nemo_record(**changes: object) -> dict[str, object]:
    """A record of NeMo-Gym: a program that adds."""
    return {
        "hash_id": "sums",
        "responses_create_params": {"input": [{"role": "user", "content": "Print the sum of the numbers."}]},
        "verifier_metadata": {"unit_tests": {"inputs": ["1 2\n", "4\n5\n"], "outputs": ["3\n", "9"]}},
        **changes,
    }


def _git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=kiwi", "-c", "user.email=kiwi@localhost", "-c", "commit.gpgsign=false"]
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True, env=env
    )
    return done.stdout
