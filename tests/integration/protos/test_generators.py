"""Stock generators of other languages take the protos as they are, and what they make compiles or loads (R112)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NoReturn

import pytest
from protos.generate import PROTOS
from tests.support.absent import absent

GOOGLE: Final = Path("/usr/include")
"""Where Debian's libprotobuf-dev has google/protobuf/*.proto."""
PACKAGES: Final = "protobuf-compiler protobuf-compiler-grpc protobuf-compiler-grpc-java-plugin libprotobuf-dev"
LANGUAGES: Final = {
    "C++": (("--cpp_out={out}",), "grpc_cpp_plugin"),
    "C#": (("--csharp_out={out}",), None),
    "Java": (("--java_out={out}",), "grpc_java_plugin"),
    "Kotlin": (("--java_out={out}", "--kotlin_out={out}"), None),
    "Objective-C": (("--objc_out={out}",), None),
    "PHP": (("--php_out={out}",), "grpc_php_plugin"),
    "Python": (("--python_out={out}",), "grpc_python_plugin"),
    "Ruby": (("--ruby_out={out}",), "grpc_ruby_plugin"),
}
"""What protoc is given for each language, and the plugin for its services, where Debian has one."""


def generate(language: str, out: Path) -> list[Path]:
    """Returns the files that protoc makes of all our protos for a language. It and its plugin must print nothing."""
    required("protoc", PACKAGES)
    if not (GOOGLE / "google" / "protobuf" / "timestamp.proto").exists():
        missing("google/protobuf/timestamp.proto", PACKAGES)
    outputs, plugin = LANGUAGES[language]
    options = [option.format(out=out) for option in outputs]
    if plugin is not None:
        options += [f"--plugin=protoc-gen-grpc={required(plugin, PACKAGES)}", f"--grpc_out={out}"]
    out.mkdir()
    protos = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    command = [required("protoc", PACKAGES), f"-I{PROTOS}", f"-I{GOOGLE}", *options, *protos]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [path for path in out.rglob("*") if path.is_file()]


def required(program: str, packages: str) -> str:
    """Returns the path of a program. Without it the test is skipped, or fails where CI is set."""
    return shutil.which(program) or missing(program, packages)


def missing(what: str, packages: str) -> NoReturn:
    """Skips the test, or fails it where CI is set."""
    absent(f"GENERATORS OF OTHER LANGUAGES ARE NOT TESTED HERE: no {what}: apt-get install {packages}")


@pytest.mark.requirement("R112")
@pytest.mark.parametrize("language", LANGUAGES)
def test_stock_generator_accepts_the_protos(language: str, tmp_path: Path) -> None:
    """Without a flag of its own for any file: packages and namespaces are in the protos."""
    protos = len(list(PROTOS.rglob("*.proto")))
    assert len(generate(language, tmp_path / "made")) >= protos


@pytest.mark.requirement("R112")
def test_generated_cpp_compiles(tmp_path: Path) -> None:
    """Against Debian's libgrpc++."""
    compiler = required("g++", "g++ libgrpc++-dev")
    if not (GOOGLE / "grpcpp" / "grpcpp.h").exists():
        missing("grpcpp/grpcpp.h", "libgrpc++-dev")
    made = tmp_path / "made"
    generate("C++", made)
    source = made / "penstock/interception/v1/intercept_service.grpc.pb.cc"
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", f"-I{made}", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.requirement("R112")
def test_generated_ruby_loads(tmp_path: Path) -> None:
    """Each file with services, by Debian's ruby-grpc."""
    ruby = required("ruby", "ruby-grpc")
    made = tmp_path / "made"
    services = [path.relative_to(made) for path in generate("Ruby", made) if path.stem.endswith("_services_pb")]
    script = "".join(f"require {str(path.with_suffix(''))!r}\n" for path in services)
    script += "puts Penstock::Interception::V1::InterceptService::Stub.instance_methods(false).sort.first"
    done = subprocess.run([ruby, f"-I{made}", "-e", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "complete_calls\n"), done.stderr


@pytest.mark.requirement("R112")
def test_generated_php_parses(tmp_path: Path) -> None:
    """The clients of all services, by PHP itself."""
    php = required("php", "php-cli")
    clients = [path for path in generate("PHP", tmp_path / "made") if path.stem.endswith("ServiceClient")]
    assert clients
    for client in clients:
        done = subprocess.run([php, "-l", str(client)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.requirement("R112")
def test_generated_python_compiles(tmp_path: Path) -> None:
    """By the oldest protoc that a distribution in use has, whose output other versions of the library may refuse."""
    made = tmp_path / "made"
    generate("Python", made)
    done = subprocess.run([sys.executable, "-m", "compileall", "-q", str(made)], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.requirement("R112")
def test_no_comment_has_a_dollar_sign() -> None:
    """grpc's generators before 1.52 read it as a variable of their templates and crash (grpc/grpc#32171)."""
    for path in PROTOS.rglob("*.proto"):
        assert "$" not in path.read_text(encoding="utf-8"), path
