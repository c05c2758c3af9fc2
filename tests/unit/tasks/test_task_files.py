"""Task files."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.terminal.commands import invoke

from penstock.client import (
    Budgets,
    CallRule,
    Command,
    Inference,
    InvalidArgument,
    Judge,
    PolicyConstraint,
    RewardFrom,
    RolloutModel,
    RolloutOptions,
    SeedFile,
    Task,
    Tokenizer,
    Upstream,
    User,
)
from penstock.client.rollouts.client import spec
from penstock.client.tasks.model_keys import load_models
from penstock.client.tasks.task import load_task
from penstock.client.wire.specs import digest
from penstock.tasks.sets import schemas
from penstock.tasks.solutions import without_calls

ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, text: str) -> Path:
    file = folder / "my task.yaml"
    file.write_text(text)
    return file


@pytest.mark.requirement("R67")
def test_a_task_file_says_everything_that_a_task_can(tmp_path: Path) -> None:
    """The instruction arrives byte for byte."""
    (tmp_path / "repo" / "src").mkdir(parents=True)
    (tmp_path / "repo" / "src" / "a.py").write_bytes(b"\xff")
    (tmp_path / "repo" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "repo" / "run").chmod(0o755)
    task = Task.load(
        write(
            tmp_path,
            """
instruction: |
  Say 'hi' $(now) & more
files:
  - {path: note.txt, content: hello, mode: "0600"}
  - {path: blob, content_base64: AP8=}
  - {path: code, from: repo}
setup:
  - [git, init]
  - pip install -e . && true
  - {argv: [make], env: {CI: "1"}, timeout: 30}
verifier:
  commands: [pytest -q]
  reward: file
  range: [-1, 1]
env: {LANG: C}
metadata: {level: 3}
""",
        )
    )
    assert (task.task_id, task.instruction) == ("my-task", "Say 'hi' $(now) & more\n")
    assert task.files[:2] == [SeedFile("note.txt", b"hello", 0o600), SeedFile("blob", b"\0\xff")]
    assert [(file.path, file.mode) for file in task.files[2:]] == [("code/run", 0o755), ("code/src/a.py", 0o644)]
    assert task.setup[0] == Command(["git", "init"]) and task.setup[1] == Command(shell="pip install -e . && true")
    assert (task.setup[2].env, task.setup[2].timeout) == ({"CI": "1"}, 30.0)
    assert task.verifier is not None
    assert (task.verifier.reward, task.verifier.range) == (RewardFrom.FILE, (-1.0, 1.0))


@pytest.mark.parametrize(("given", "mode"), [("", 0o755), ("mode: '0600'", 0o600), ("mode: '0000'", 0), ("mode: 0", 0)])
def test_the_mode_of_a_named_file_is_the_one_that_is_set(tmp_path: Path, given: str, mode: int) -> None:
    """Without one, it is the file's own."""
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    task = Task.load(write(tmp_path, f"instruction: x\nfiles: [{{path: a, from: run, {given}}}]\n"))
    assert [file.mode for file in task.files] == [mode]


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ("instruction: x\ninstrution: y", "instrution", "no such key"),
        ("task_id: x", "task", "instruction"),
        ("instruction: x\nsetup: [{argv: []}]", "setup.0", "argv"),
        ("instruction: x\nverifier: {commands: []}", "verifier.commands", "must not be empty"),
        ("instruction: x\nfiles: [{path: a, content: b, from: c}]", "files.0", "exactly one"),
        ("instruction: x\nfiles: [{path: a, from: absent}]", "files.0.from", "absent"),
        ("instruction: x\nfiles: [{path: a, content: b, mode: rw}]", "files.0.mode", "octal"),
        ("instruction: x\nfiles: [{path: a, from: ., mode: '0600'}]", "files.0.mode", "each file of a directory"),
        ("instruction: x\nenv: {A: 1}", "env.A", "must be text: put it in quotes"),
        ("instruction_file: absent.md", "instruction_file", "absent.md"),
        ("- x", "task", "must be a mapping"),
        ("a: [", "my task.yaml", "line 2"),
        ("instruction: x\ntask_id: a/b", "task_id", "pattern"),
    ],
)
def test_invalid_task_is_refused_with_field_and_reason(tmp_path: Path, text: str, field: str, description: str) -> None:
    """A malformed task gets a typed error that names the field and the reason."""
    with pytest.raises(InvalidArgument) as caught:
        Task.load(write(tmp_path, text))
    assert any(field in item.field and description in item.description for item in caught.value.violations), str(
        caught.value
    )


@pytest.mark.parametrize(
    ("text", "field", "description"),
    [
        ("files: [{path: ../x, content: a}]", "files.0.path", "without '..'"),
        ("files: [{path: a/../../x, content: a}]", "files.0.path", "without '..'"),
        ("files: [{path: a/, content: a}]", "files.0.path", "the path of a file"),
        ("files: [{path: /, content: a}]", "files.0.path", "the path of a file"),
        ("files: [{path: a, content: a, mode: '4755'}]", "files.0.mode", "permission bits"),
        ("files: [{path: a, content_base64: '?'}]", "files.0.content_base64", "must be base64"),
        ("setup: ['  ']", "setup.0", "must not be empty"),
        ("setup: [[a, 1]]", "setup.0.1", "must be text: put it in quotes"),
        ("setup: [{shell: a, timeout: 700000}]", "setup.0.timeout", "must be at most 604800"),
        ("setup: [{shell: a, timeout: .inf}]", "setup.0.timeout", "finite"),
        ("env: {a-b: c}", "env.a-b", "the name of an environment variable"),
        ("labels: {a b: c}", "labels.a b", "letters, digits"),
        ("labels: {penstock_x: c}", "labels.penstock_x", "reserved"),
        ("limits: {agent: soon}", "limits.agent", "must be a number"),
        ("limits: {agent: 700000}", "limits.agent", "must be at most 604800"),
        ("budgets: {max_calls: 1.5}", "budgets.max_calls", "must be a whole number"),
        ("budgets: {max_calls: 3000000000}", "budgets.max_calls", "must be less than"),
        ("budgets: {call_rate: {calls: 1, period: 100000}}", "budgets.call_rate.period", "must be at most 86400"),
        ("keep_diff: maybe", "keep_diff", "must be true or false"),
        ("setup: {a: b}", "setup", "must be a list"),
        ("files: {a.txt: b}", "files", "must be a list of {path, content"),
        ("sandbox: {setup_network: {hosts: a}}", "sandbox.setup_network.hosts", "must be a list of texts"),
        ("sandbox: {agent_network: {ports: [80]}}", "sandbox.agent_network", "all that the operator allows but"),
        ("sandbox: {agent_network: {hosts: [a, A]}}", "sandbox.agent_network.hosts.1", "'A': expected"),
        (
            "sandbox: {verifier_network: {denied_hosts: ['*']}}",
            "sandbox.verifier_network.denied_hosts.0",
            "'*': expected",
        ),
        ("sandbox: {packages: {debian: absent.txt}}", "sandbox.packages.debian", "absent.txt"),
        ("sandbox: {packages: {}}", "sandbox.packages", "set python, npm or debian"),
        ("sandbox: {setup_network: all}", "sandbox.setup_network", "must be 'open'"),
        ("sandbox: {setup_network: {hosts: [a], port: [1]}}", "sandbox.setup_network.port", "did you mean ports?"),
        ("mcp_servers: [{name: a b, args: [x]}]", "mcp_servers.0.name", "letters, digits"),
        ("mcp_servers: [{name: penstock, args: [x]}]", "mcp_servers.0.name", "the gate's own server"),
        ("mcp_servers: [{name: a}]", "mcp_servers.0", "set args (a program) or url"),
        ("mcp_servers: [{name: a, args: [x], url: 'http://b'}]", "mcp_servers.0", "set args (a program) or url"),
        ("mcp_servers: [{name: a, url: 'http://b', env: {C: d}}]", "mcp_servers.0.env", "url is set"),
        ("mcp_servers: [{name: a, url: 'ftp://b'}]", "mcp_servers.0.url", "http://"),
        ("mcp_servers: [{name: a, args: [x]}, {name: a, args: [y]}]", "mcp_servers.1.name", "a is used twice"),
        ("models: [{policy_id: a b}]", "models.0.policy_id", "must be 1 to 128 of"),
        ("models: [{policy_id: a, polcy: {}}]", "models.0.polcy", "did you mean policy?"),
        ("models: [{policy_id: a, inference: b, upstream: c}]", "models.0.upstream", "set inference or upstream"),
        ("models: [{policy_id: a, model: b}]", "models.0.model", "of an upstream, which is not set"),
        ("models: [{policy_id: a, upstream: b}]", "models.0", "trained must be false"),
        ("models: [{policy_id: a, tokenizer: b, delegated: true}]", "models.0.delegated", "a tokenizer answers no"),
        ("models: [{policy_id: a}, {policy_id: b}]", "models.0", "calls is required: a further model has this name"),
        ("models: [{policy_id: a, calls: {from_turn: 3}}]", "models.0.calls", "takes all calls that are left"),
        (
            "models: [{policy_id: a, calls: {from_turn: 3, until_turn: 3}}, {policy_id: a}]",
            "models.0.calls.until_turn",
            "must be more than from_turn",
        ),
        (
            "models: [{policy_id: a, calls: {call_classes: [subagent]}}, {policy_id: a}]",
            "models.0.calls.call_classes.0",
            "did you mean sub_agent?",
        ),
        (
            "models: [{policy_id: a, calls: {call_classes: [judge]}}, {policy_id: a}]",
            "models.0.calls.call_classes.0",
            "is not a class of an agent's calls",
        ),
        ("metadata: {when: 2024-01-01}", "metadata.when", "in quotes"),
        ("verifier: {commands: [a], reward: best}", "verifier.reward", "must be 'file' or 'passed_share'"),
        ("verifier: {commands: [a], range: [1, 0]}", "verifier.range", "the lowest first"),
        ("verifier: {commands: [a], restore: ['**']}", "verifier.restore.0", "restore everything"),
        ("verifier: {commands: [a], fresh_fork: false, changes_below: [a]}", "verifier.changes_below", "fresh_fork"),
        ("verifier: {commands: [a], changes_below: [tmp, /tmp/x]}", "verifier.changes_below.1", "/tmp is memory"),
        ("verifier: {commands: [a], component_ranges: {a: [0, 1]}}", "verifier.component_ranges", "reward: file"),
        ("verifier: {commands: [a], copies: [out]}", "verifier.copies.0", "must be an absolute path"),
        ("verifier: {commands: [a], copies: [/proc/x]}", "verifier.copies.0", "/proc is memory"),
        ("verifier: {commands: [a], copies: [{path: /a, exclude: [b/c]}]}", "verifier.copies.0.exclude.0", "names"),
        ("verifier: {commands: [a], copies: [/a/b, /a]}", "verifier.copies.1", "contains or is in /a/b"),
        ("verifier: {commands: [a], collect: [b], fresh_fork: false}", "verifier.collect", "needs a fresh fork"),
        ("verifier: {commands: [a], user: root}", "verifier.user", "needs an image"),
        ("verifier: {commands: [a], build: b}", "verifier.build", "no usable Dockerfile"),
        ("verifier: {commands: [a], judge: {}, fresh_fork: false}", "verifier.judge", "needs a fresh fork"),
        ("verifier: {commands: [a], judge: {inference: a, upstream: b}}", "verifier.judge.upstream", "or upstream"),
        ("verifier: {commands: [a], judge: {model: b}}", "verifier.judge.model", "of an upstream"),
        ("verifier: {commands: [a], judge: {budgets: {max_calls: 0}}}", "verifier.judge.budgets.max_calls", "must be"),
    ],
)
def test_values_that_a_rollout_refuses_are_one_problem_of_the_file(
    tmp_path: Path, text: str, field: str, description: str
) -> None:
    """Issue 6, point 6: nothing waits for a rollout to be found, and nothing is said in the words of a library."""
    with pytest.raises(InvalidArgument) as caught:
        Task.load(write(tmp_path, f"instruction: x\n{text}"))
    [item] = caught.value.violations
    assert (item.field, item.description.partition(": ")[0]) == (field, "line 2")
    assert description in item.description and "nput should" not in item.description


@pytest.mark.requirement("R134")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", Judge()),
        ("{inference: big, budgets: {max_calls: 3}}", Judge(source=Inference("big"), budgets=Budgets(max_calls=3))),
        ("{upstream: openai, model: m}", Judge(source=Upstream(name="openai", model="m"))),
    ],
)
def test_a_task_file_names_its_verifiers_judge(tmp_path: Path, text: str, expected: Judge) -> None:
    task = Task.load(write(tmp_path, f"instruction: x\nverifier: {{commands: [a], judge: {text}}}"))
    assert task.verifier is not None and task.verifier.judge == expected


MODELS = """
- {policy_id: teacher, inference: "", adapter: big, trained: false, calls: {from_index: 1, call_classes: [main, title]}}
- {policy_id: cloud, name: x, upstream: openai, model: m, trained: false}
- {policy_id: critic, name: y, tokenizer: tiny, policy: {min_version: 3}, delegated: false}
- {policy_id: student}
"""


@pytest.mark.requirement("R133")
def test_a_task_file_or_one_of_its_own_names_the_models_of_a_rollout(tmp_path: Path) -> None:
    """They are options of the task's rollouts, which an option of a rollout replaces; a check calls none of them."""
    models = [
        RolloutModel(
            policy_id="teacher",
            source=Inference("", "big"),
            trained=False,
            calls=CallRule(from_index=1, call_classes=("main", "title")),
        ),
        RolloutModel(policy_id="cloud", name="x", source=Upstream(name="openai", model="m"), trained=False),
        RolloutModel(
            policy_id="critic",
            name="y",
            source=Tokenizer("tiny"),
            policy=PolicyConstraint(min_version=3),
            delegated=False,
        ),
        RolloutModel(policy_id="student"),
    ]
    assert load_models(write(tmp_path, MODELS)) == models
    plain = Task.load(write(tmp_path, "instruction: x"))
    task = Task.load(write(tmp_path, f"instruction: x\nmodels:{MODELS}"))
    assert task.models == models and digest(task) == digest(plain)
    given: list[RolloutOptions] = [{}, {"models": models[-1:]}]
    of_each = [[one.policy_id for one in spec(task, "shell", options).models] for options in given]
    assert of_each == [["teacher", "cloud", "critic", "student"], ["student"]]
    assert not spec(task, "shell", without_calls({})).models


@pytest.mark.requirement("R133")
def test_a_file_of_models_is_checked_before_anything_starts(tmp_path: Path) -> None:
    """Its problems have their lines."""
    (tmp_path / "task.yaml").write_text("instruction: x")
    for text, problem in (
        ("- policy_id: a\n  cals: {}", "0.cals: line 2: no such key; did you mean calls?"),
        ("- policy_id: a\n- policy_id: b", "0: line 1: calls is required"),
        ("policy_id: a", "policy_id: line 1: no such key"),
        ("[]", "must not be empty"),
    ):
        models = write(tmp_path, text)
        code, _, err = invoke(
            "rollout", "--agent", "shell", "--task", str(tmp_path / "task.yaml"), "--models", str(models)
        )
        assert (code, problem in err) == (2, True), err


@pytest.mark.parametrize("said", ["''", "'  '", "|\n \n"])
def test_an_empty_instruction_is_refused_wherever_it_stands(tmp_path: Path, said: str) -> None:
    """An agent that is told nothing would be refused when its rollout is made."""
    (tmp_path / "said.md").write_text("\n")
    for text in (f"instruction: {said}", "instruction_file: said.md"):
        with pytest.raises(InvalidArgument, match="is empty: describe what the agent shall do"):
            Task.load(write(tmp_path, text))


def test_problems_of_a_file_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    """Issue 6, point 6: also what needs the files beside it, or several keys, whatever else does not hold."""
    text = """
task_id: a b
files:
  - {path: a, from: absent}
  - {path: ../b, content: c, content_base64: AA==}
setup: [3]
verifier:
  commands: []
  files: [{path: c, from: missing}]
build: nowhere
"""
    code, _, err = invoke("tasks", "check", str(write(tmp_path, text)))
    assert code == 2
    told = [line.strip().removeprefix(f"{tmp_path}/my task.yaml: ") for line in err.splitlines()[1:]]
    assert told.pop(0) == "task: set instruction or instruction_file", told
    assert [line.partition(": line")[0] for line in told] == [
        "task_id",
        "files.0.from",
        "files.1",
        "files.1.path",
        "setup.0",
        "verifier.commands",
        "verifier.files.0.from",
        "build",
    ]
    assert all(": line " in line for line in told)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["instruction", "files", "setup", "verifier", "path", "content", "argv", "mode", "env"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.requirement("R80")
@given(st.one_of(_VALUES, st.binary(max_size=64)))
def test_any_content_is_a_task_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    """R80's spirit for our own files: nothing but a Task or an InvalidArgument comes out."""
    import yaml

    file = tmp_path_factory.mktemp("t") / "task.yaml"
    file.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    with contextlib.suppress(InvalidArgument):
        assert isinstance(load_task(file), Task)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(InvalidArgument, match=r"absent.yaml: No such file"):
        Task.load(tmp_path / "absent.yaml")


@pytest.mark.requirement("R42")
def test_argv_given_as_text_is_refused_with_the_right_form() -> None:
    """Argv, not shell strings."""
    with pytest.raises(InvalidArgument, match="shell="):
        Command("rm -rf x")


def test_the_dashboards_form_knows_the_keys_that_a_task_file_has() -> None:
    """A key that the page does not know is refused there; what the schema has is taken, or refused by name."""
    form = json.loads((ROOT / "clients/web/src/start/keys.json").read_text(encoding="utf-8"))
    schema = schemas()["task"]
    tables = {
        re.sub("(?<=.)(Table|File)$", "", name.strip("_")).lower(): found for name, found in schema["$defs"].items()
    }
    for short in ("command", "copiedpath"):
        tables[short] = tables[short]["anyOf"][0]
    assert form["task"] == list(schema["properties"])
    for name in form.keys() - {"task"}:
        assert sorted(form[name]) == sorted(tables[name]["properties"]), name


@pytest.mark.requirement("R133", "R63")
def test_a_user_of_a_task_is_a_script_or_a_model(tmp_path: Path) -> None:
    """What is of a model is refused of a script, by its line."""
    file = tmp_path / "task.yaml"
    file.write_text("instruction: go\nuser: {prompt: be curt, upstream: openai, model: m, max_instructions: 3}\n")
    assert Task.load(file).user == User(
        prompt="be curt", source=Upstream(name="openai", model="m"), instructions=[], max_instructions=3
    )
    file.write_text("instruction: go\nuser: {instructions: [on], temperature: 1}\n")
    with pytest.raises(InvalidArgument, match="is of a model: set prompt"):
        Task.load(file)
