"""Makes the messages and stubs of `protos/` in every language that has a client here.

    python -m protos.generate            write them
    python -m protos.generate --check    write nothing; exit 1 and list the files if what is committed differs

The output depends on the protos and the pinned generators only. Everything in a language's folder but `by_hand` is
generated: a file that no proto accounts for is removed. A further language is a function and its line in `LANGUAGES`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import google.rpc.status_pb2
import grpc_tools
from google.protobuf import descriptor_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from clients import nodejs
from tools import golang
from tools.names import names

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
_INCLUDES = (
    PROTOS,
    Path(grpc_tools.__file__).parent / "_proto",  # google/protobuf
    Path(google.rpc.status_pb2.__file__).parents[2],  # google/rpc
)
GO_MODULE: Final = names()["go"]
"""The Go client's module, as in its go.mod and in each proto's `go_package`."""
_PROVISIONAL: Final = 50103
"""Number of the option `provisional_method`."""
_ERROR_DETAILS: Final = "google/rpc/error_details.proto"


@dataclass(frozen=True, slots=True)
class Language:
    """Where one language's generated code is kept, and what makes it.

    Attributes:
        name: of the language.
        folder: where it is kept.
        generate: makes it in an empty directory, which stands for `folder`. Raises SystemExit: a generator is missing
            or refused a proto; says which.
        by_hand: directories of the folder that are not generated.
    """

    name: str
    folder: Path
    generate: Callable[[Path], None]
    by_hand: tuple[str, ...] = ()


def compile_protos(plugins: Mapping[str, Path], options: Sequence[str], protos: Sequence[str] = ()) -> None:
    """Runs the compiler.

    Args:
        plugins: generators by the compiler's name for each, `protoc-gen-NAME`.
        options: what is made, and where.
        protos: from which, by their names in imports; none = all of ours.

    Raises:
        SystemExit: there is no proto, or the compiler refused one (it printed the reason).
    """
    protos = protos or sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    if not protos:
        sys.exit(f"no .proto file under {PROTOS.relative_to(ROOT)}/")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        # Where `options` say what the protos are, they are not looked for.
        *(
            ()
            if any(item.startswith("--descriptor_set_in") for item in options)
            else (f"-I{item}" for item in _INCLUDES)
        ),
        *(f"--plugin={name}={path}" for name, path in plugins.items()),
        *options,
        *protos,
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit("protoc refused the protos (above)")


def python(target: Path) -> None:
    """The messages, stubs and types of `penstock.*.v1`."""
    # The mypy plugins are scripts beside this interpreter, which need not be on PATH.
    plugins = {name: Path(sys.executable).with_name(name) for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")}
    with tempfile.TemporaryDirectory() as scratch:
        outputs = ("python_out=", "grpc_python_out=", "mypy_out=quiet:", "mypy_grpc_out=quiet:")
        described = Path(scratch) / "described"
        compile_protos(plugins, [f"--{output}{scratch}" for output in outputs] + [f"--descriptor_set_out={described}"])
        for path, methods in _not_served(described).items():
            _need_not_be_defined(Path(scratch) / path, methods)
        shutil.copytree(Path(scratch) / "penstock", target, dirs_exist_ok=True)
    for package in sorted({path.parent for path in target.rglob("*_pb2.py")}):
        name = ".".join(("penstock", *package.relative_to(target).parts))
        (package / "__init__.py").write_text(f'"""Generated from the protos of {name}."""\n', encoding="utf-8")
        # The area is a package of its own too; `penstock` above it never is (it is shared by several distributions).
        (package.parent / "__init__.py").write_text('"""Generated."""\n', encoding="utf-8")
        (package.parent / "py.typed").touch()


def _not_served(described: Path) -> dict[str, set[str]]:
    """The provisional RPCs by the file of types that has their servicer."""
    files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
    return {
        file.name.removesuffix(".proto") + "_pb2_grpc.pyi": names
        for file in files
        if (
            names := {
                method.name
                for service in file.service
                for method in service.method
                # The option is an extension that this program does not know.
                if _PROVISIONAL in _unknown(method.options)
            }
        )
    }


def _unknown(options: descriptor_pb2.MethodOptions) -> set[int]:
    """The numbers of the fields that this program does not know."""
    fields = UnknownFieldSet(options)
    return {fields[index].field_number for index in range(len(fields))}


def _need_not_be_defined(path: Path, methods: set[str]) -> None:
    """Take the mark of an abstract method off those that no service defines: the base class refuses them."""
    text = path.read_text(encoding="utf-8")
    for name in methods:
        text = re.sub(rf"    @_abc_1\.abstractmethod\n(    def {name}\()", r"\1", text)
    path.write_text(text, encoding="utf-8")


def typescript(target: Path) -> None:
    """The messages and services of `penstock.*.v1`, and those of google.rpc that errors carry."""
    script = ROOT / "clients" / "typescript" / "node_modules" / ".bin" / "protoc-gen-es"
    prepared = nodejs.environment()
    if not script.exists():
        sys.exit("protoc-gen-es is not installed: run `make protos`, or `npm ci` in clients/typescript")
    with tempfile.TemporaryDirectory() as scratch:
        plugin = Path(scratch) / "protoc-gen-es"
        node = shutil.which("node", path=prepared["PATH"])
        plugin.write_text(f"#!/bin/sh\nexec {shlex.quote(str(node))} {shlex.quote(str(script))}\n", encoding="utf-8")
        plugin.chmod(0o755)
        plugins, options = {"protoc-gen-es": plugin}, [f"--es_out={target}", "--es_opt=target=ts,import_extension=js"]
        compile_protos(plugins, options)
        # What travels, without the prose of its source: the compiler leaves it out of descriptors.
        described = Path(scratch) / "described"
        compile_protos({}, ["--include_imports", f"--descriptor_set_out={described}"], [_ERROR_DETAILS])
        compile_protos(plugins, [f"--descriptor_set_in={described}", *options], [_ERROR_DETAILS])


def go(target: Path) -> None:
    """The messages and services of `penstock.*.v1`."""
    options: list[str] = []
    for output in ("go", "go-grpc"):
        options += [f"--{output}_out={target}", f"--{output}_opt=module={GO_MODULE}/gen"]
    compile_protos(golang.plugins(), options)


LANGUAGES: Final = (
    Language("Python", ROOT / "clients" / "python" / "stubs" / "penstock", python, by_hand=("tables", "values")),
    Language("TypeScript", ROOT / "clients" / "typescript" / "src" / "gen", typescript),
    Language("Go", ROOT / "clients" / "go" / "gen", go),
)
"""The languages that have a client here."""


def main() -> None:
    """Writes or checks; see the module's text."""
    check = "--check" in sys.argv[1:]
    stale: list[str] = []
    for language in LANGUAGES:
        with tempfile.TemporaryDirectory() as scratch:
            language.generate(Path(scratch))
            made = _content(Path(scratch))
        kept = _content(language.folder)
        committed = {name: content for name, content in kept.items() if name.split("/")[0] not in language.by_hand}
        differing = sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))
        if check:
            stale += [str((language.folder / name).relative_to(ROOT)) for name in differing]
            continue
        for name in differing:
            path = language.folder / name
            if name in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(made[name])
            else:
                path.unlink()
        folder = language.folder.relative_to(ROOT)
        print(f"{language.name}: {len(made)} files under {folder}, {len(differing)} changed")
    if stale:
        sys.exit("generated code differs from the protos; run `make protos` and commit:\n  " + "\n  ".join(stale))


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


if __name__ == "__main__":
    main()
