"""Locks of packages: what is read of them, and what is refused by its line or place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.endpoints.package_index import integrity, npm_lock

from penstock.values.locks import (
    MAX_DEBIAN_PACKAGES,
    MAX_LOCK_BYTES,
    MAX_PACKAGES,
    DebianPackage,
    LockProblem,
    PinnedPackage,
    debian_lock,
    python_lock,
)
from penstock.values.locks import npm_lock as read_npm_lock

HASH = "sha256:" + "a" * 64
GOOD = {"version": "1.0.0", "integrity": integrity(b"content")}

names = st.sampled_from(["pytest", "A", "zope.interface", "typing_extensions", "x-1.y"])
versions = st.sampled_from(["8.3.3", "1", "2!1.0rc1", "1.0.post1+local.2"])
hashes = st.lists(st.integers(0, 2**256 - 1).map(lambda number: f"sha256:{number:064x}"), min_size=1, max_size=3)
markers = st.sampled_from(["", "python_version < '3.11'", 'sys_platform == "linux" and python_version >= "3.9"'])
pinned = st.builds(
    lambda *parts: PinnedPackage(parts[0], parts[1], tuple(parts[2]), parts[3]), names, versions, hashes, markers
)


@pytest.mark.requirement("R151")
@given(st.lists(pinned, min_size=1, max_size=8), st.data())
def test_what_a_lock_pins_is_read_however_it_is_laid_out(packages: list[PinnedPackage], data: st.DataObject) -> None:
    """On one line or several, with comments and blank lines anywhere that pip takes them."""
    text = ""
    for package in packages:
        joint = data.draw(st.sampled_from([" ", " \\\n    "]))
        condition = f" ; {package.marker}" if package.marker else ""
        extra = data.draw(st.sampled_from(["", "[toml]"]))
        text += f"{package.name}{extra}=={package.version}{condition}"
        text += "".join(f"{joint}--hash={value}" for value in package.hashes)
        text += data.draw(st.sampled_from(["\n", "  # a comment\n", "\n    # via that\n", "\n\n# --index-url x\n"]))
    assert python_lock(text) == tuple(packages)


@given(st.text(max_size=200))
def test_any_text_is_a_lock_or_a_problem(text: str) -> None:
    """Nothing else is raised, whatever a stranger writes."""
    for read in (python_lock, read_npm_lock):
        try:
            read(text)
        except LockProblem as problem:
            assert str(problem)


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pytest==8.0", "line 1: pytest has no --hash"),
        (f"# pinned\npytest --hash={HASH}", "line 2: 'pytest --hash"),
        (f"pytest>=8 --hash={HASH}", "is not NAME==VERSION"),
        (f"pytest==8.* --hash={HASH}", "is not NAME==VERSION"),
        (f"pytest @ https://elsewhere/pytest.whl --hash={HASH}", "is not NAME==VERSION"),
        (f"../../etc==1 --hash={HASH}", "is not NAME==VERSION"),
        (f"./here.whl --hash={HASH}", "is not NAME==VERSION"),
        (f"${{NAME}}==1 --hash={HASH}", "is not NAME==VERSION"),
        ("--index-url https://elsewhere/simple", "is an option"),
        ("-r /etc/passwd", "is an option"),
        ("-e .", "is an option"),
        (f"pytest==8.0 --hash={HASH} --config-settings=x", "is not --hash=sha256:"),
        ("pytest==8.0 --hash=md5:" + "a" * 32, "is not --hash=sha256:"),
        (f"pytest==8.0 ; os.system('x') & y --hash={HASH}", "is not a condition"),
        ("# nothing", "names no package"),
        ("a==1\n" * (MAX_LOCK_BYTES // 5 + 1), f"at most {MAX_LOCK_BYTES} are allowed"),
        (f"a==1 --hash={HASH}\n" * (MAX_PACKAGES + 1), f"more than {MAX_PACKAGES} packages"),
    ],
)
def test_a_python_lock_is_refused_by_line_and_reason(text: str, named: str) -> None:
    with pytest.raises(LockProblem) as caught:
        python_lock(text)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.requirement("R151")
def test_nothing_of_an_npm_lock_is_kept_that_could_lead_elsewhere() -> None:
    """Addresses and unknown keys are dropped; the project's own scripts too."""
    entry = {**GOOD, "resolved": "https://elsewhere/tool.tgz", "funding": "x", "bin": {"tool": "bin/tool.js"}}
    found = read_npm_lock(npm_lock({"tool": entry}, scripts={"install": "touch /tmp/x"}, hasInstallScript=True))
    assert "elsewhere" not in found.lock and "scripts" not in found.manifest and found.packages == 1
    kept = json.loads(found.lock)["packages"]["node_modules/tool"]
    assert kept == {**GOOD, "bin": {"tool": "bin/tool.js"}}
    assert json.loads(found.manifest)["dependencies"] == {"tool": "1.0.0"}


@pytest.mark.requirement("R151")
def test_packages_with_install_scripts_are_known() -> None:
    found = read_npm_lock(npm_lock({"tool": {**GOOD, "hasInstallScript": True}, "@a/b": GOOD}))
    assert found.with_scripts == ("node_modules/tool",)


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    ("packages", "root", "named"),
    [
        ({"tool": {"version": "1.0.0"}}, {}, "'node_modules/tool' has no integrity"),
        ({"tool": {**GOOD, "integrity": "sha1-2jmj7l5rSw0yVb/vlWAYkK/YBwk="}}, {}, "SHA-256 or stronger"),
        ({"tool": {**GOOD, "integrity": "sha512-x"}}, {}, "SHA-256 or stronger"),
        ({"tool": {**GOOD, "link": True}}, {}, "is a link"),
        ({"tool": {**GOOD, "version": "git+ssh://git@host/x"}}, {"dependencies": {}}, "no version of a registry"),
        ({"../../../etc": GOOD}, {"dependencies": {}}, "is not below node_modules/"),
        ({"..": GOOD}, {"dependencies": {}}, "is not below node_modules/"),
        ({"tool/../../x": GOOD}, {"dependencies": {}}, "is not below node_modules/"),
        ({"tool": {**GOOD, "bin": {"../x": "a.js"}}}, {}, "leads out of the package"),
        ({"tool": {**GOOD, "bin": {"x": "../../../bin/sh"}}}, {}, "leads out of the package"),
        ({"tool": {**GOOD, "bin": {"x": "/bin/sh"}}}, {}, "leads out of the package"),
        ({"tool": {**GOOD, "name": "../x"}}, {}, "is not a package's name"),
        *(
            ({"tool": {**GOOD, "dependencies": {"other": wanted}}}, {}, "only packages of a registry")
            for wanted in (
                "http://169.254.169.254/x",
                "git+https://host/x",
                "owner/repository",
                "file:../x",
                "./x",
                "..",
                "x.tgz",
                "~/x",
                "npm:@a/b/c@1",
                "workspace:*",
                7,
            )
        ),
        ({"tool": GOOD}, {"devDependencies": {"x": "https://elsewhere"}}, "only packages of a registry"),
        ({"tool": GOOD}, {"dependencies": ["x"]}, "is not a mapping"),
        ({}, {}, "names no package"),
    ],
)
def test_an_npm_lock_is_refused_by_place_and_reason(packages: dict[str, Any], root: dict[str, Any], named: str) -> None:
    with pytest.raises(LockProblem) as caught:
        read_npm_lock(npm_lock(packages, **root))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("NaN", "is not JSON"),
        ("[]", "lockfileVersion 2 or 3"),
        ('{"lockfileVersion": 1, "dependencies": {}}', "lockfileVersion 2 or 3"),
        ('{"lockfileVersion": 3}', 'has no "packages"'),
        (" " * (MAX_LOCK_BYTES + 1), f"at most {MAX_LOCK_BYTES} are allowed"),
        (npm_lock({f"p{number}": {"version": "1"} for number in range(MAX_PACKAGES + 1)}), "more than 5000 packages"),
        (npm_lock({"tool": {**GOOD, "engines": {"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}}}), "is not a package's entry"),
    ],
)
def test_what_is_no_npm_lock_is_refused(text: str, named: str) -> None:
    with pytest.raises(LockProblem, match=named.replace("(", r"\(")):
        read_npm_lock(text)


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)))
def test_any_value_in_an_npm_lock_is_read_or_refused(value: Any) -> None:
    """Each key of an entry may hold anything."""
    keys = ("version", "integrity", "bin", "name", "dependencies", "peerDependenciesMeta", "os", "inBundle", "link")
    for key in keys:
        try:
            read_npm_lock(npm_lock({"tool": {**GOOD, key: value}}, dependencies={"tool": "1"}))
        except LockProblem as problem:
            assert "node_modules/tool" in str(problem) or "the project" in str(problem)


SHA = f"--hash={HASH}"
JQ = f"jq=1.6-2.1+deb12u1 pool/main/j/jq/jq_1.6-2.1+deb12u1_amd64.deb {SHA}"


@pytest.mark.requirement("R151")
def test_a_list_of_debian_packages_is_read_in_its_order() -> None:
    epoch = f"vim=2:9.0~rc1-1 pool/v/vim_9.0~rc1-1_all.deb {SHA}"
    found = debian_lock(f"# for Debian 12\n\n{JQ}\n{epoch}  \n")
    path = "pool/main/j/jq/jq_1.6-2.1+deb12u1_amd64.deb"
    assert found[0] == DebianPackage("jq", "1.6-2.1+deb12u1", path, "amd64", "a" * 64)
    assert [package.line for package in found] == [JQ, epoch]


@pytest.mark.requirement("R151", "R64")
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "names no package"),
        ("jq", "line 1: 'jq' is not NAME=VERSION"),
        (f"{JQ}\n{JQ}", "line 2: jq is named twice"),
        (JQ.replace("sha256", "md5"), "penstock tasks lock"),
        (JQ.replace("pool/main", "../main"), "line 1"),
        (JQ.replace("pool/main", "/main"), "line 1"),
        (JQ.replace("pool/main", "pool/.."), "line 1"),
        (JQ.replace("pool/main", "http://host"), "line 1"),
        (JQ.replace("pool/main", "pool/%2e%2e"), "line 1"),
        (JQ.replace("pool/main", "a?b"), "line 1"),
        (JQ.replace(".deb ", ".tar "), "line 1"),
        ("\n".join(JQ.replace("jq=", f"jq{n}=") for n in range(MAX_DEBIAN_PACKAGES + 1)), "more than 256 packages"),
        ("#" * (MAX_LOCK_BYTES + 1), f"at most {MAX_LOCK_BYTES} are allowed"),
        ("a" * 1_000_000, "line 1"),
    ],
)
def test_what_is_no_debian_lock_is_refused_by_its_line(text: str, named: str) -> None:
    with pytest.raises(LockProblem) as caught:
        debian_lock(text)
    assert named in str(caught.value)
