"""What of a task's locks is installed for which sandboxes."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_driver.domain.ports import Packages
from penstock_driver.environments import packages
from penstock_driver.environments.packages import _Base, _markers, toolbox

HASH = "--hash=sha256:" + "a" * 64
LINUX = {
    "libc": "glibc 2.36",
    "implementation_name": "cpython",
    "platform_machine": "x86_64",
    "python_full_version": "3.12.4",
    "python_version": "3.12",
    "sys_platform": "linux",
}


def base(*, node: bool = True, **changed: str) -> _Base:
    return _Base(_markers(json.dumps({**LINUX, **changed}).encode()), node)


@pytest.mark.requirement("R151")
def test_conditions_are_decided_for_the_python_of_the_sandbox() -> None:
    """The Python of this process does not matter."""
    lock = f"a==1 ; python_version < '3.12' {HASH}\na==2 ; python_version >= '3.12' {HASH}\n"
    lock += f"b==1; sys_platform == 'win32' {HASH}"
    assert toolbox(Packages(python=lock), base()).python_packages == [f"a==2 {HASH}"]
    old = base(python_version="3.9", python_full_version="3.9.2")
    assert toolbox(Packages(python=lock), old).python_packages == [f"a==1 {HASH}"]


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    ("libc", "machine", "wheels"),
    [
        ("glibc 2.36", "x86_64", "manylinux_2_36_x86_64"),
        ("glibc 2.17.5", "aarch64", "manylinux_2_17_aarch64"),
        ("", "x86_64", "musllinux_1_2_x86_64"),
    ],
)
def test_wheels_are_those_of_the_sandboxes_c_library(libc: str, machine: str, wheels: str) -> None:
    target = toolbox(Packages(python=f"a==1 {HASH}"), base(libc=libc, platform_machine=machine)).python_target
    assert target is not None and (target.version, target.platform) == ("3.12", wheels)


@pytest.mark.requirement("R151")
@pytest.mark.parametrize(
    "output",
    [
        None,
        b"",
        b"[1]",
        json.dumps({**LINUX, "python_version": "2.7"}).encode(),
        json.dumps({**LINUX, "implementation_name": "pypy"}).encode(),
        json.dumps({**LINUX, "platform_machine": "x86_64 --index-url"}).encode(),
        json.dumps({**LINUX, "python_version": 3.12}).encode(),
    ],
)
def test_an_image_without_a_usable_python_is_refused_by_the_field(output: bytes | None) -> None:
    """Whatever an image's python3 prints."""
    with pytest.raises(FailedPrecondition, match=r"sandbox\.packages\.python") as caught:
        toolbox(Packages(python=f"a==1 {HASH}"), _Base(_markers(output), True))
    assert caught.value.reason == "CAPABILITY_MISSING"


@pytest.mark.requirement("R151")
def test_a_package_that_is_named_twice_for_one_python_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"a-b is named more than once for Python 3\.12"):
        toolbox(Packages(python=f"a.b==1 {HASH}\nA_b==2 ; python_version > '3.8' {HASH}"), base())


@pytest.mark.requirement("R151")
def test_node_comes_with_the_packages_only_where_the_image_has_none() -> None:
    assert toolbox(Packages(npm="{}"), base()).runtimes == []
    assert [runtime.kind for runtime in toolbox(Packages(npm="{}"), base(node=False)).runtimes] == ["node"]


@pytest.mark.requirement("R151")
def test_the_program_that_asks_a_sandbox_names_this_machines_python() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", packages._PROBE], capture_output=True, check=True)
    found = _markers(done.stdout)
    assert found is not None and found["python_version"] == f"3.{sys.version_info.minor}"
    assert found["platform_machine"] == platform.machine()
