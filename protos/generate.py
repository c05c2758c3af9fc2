"""Makes the Python messages and stubs of `protos/` in `clients/python/stubs`.

    python protos/generate.py            write them
    python protos/generate.py --check    write nothing; exit 1 and list the files if what is committed differs

The output depends on the protos and the pinned generators only. Everything under `clients/python/stubs/penstock` is
generated: a file that no proto accounts for is removed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import google.rpc.status_pb2
import grpc_tools

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "clients" / "python" / "stubs" / "penstock"


def generate(target: Path) -> dict[str, bytes]:
    """Runs the compiler into an empty directory; returns each file's content by its path below `penstock/`.

    Raises:
        SystemExit: there is no proto, or the compiler refused one (it has said why).
    """
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    if not protos:
        sys.exit(f"no .proto file under {PROTOS.relative_to(ROOT)}/")
    includes = [
        PROTOS,
        Path(grpc_tools.__file__).parent / "_proto",  # google/protobuf
        Path(google.rpc.status_pb2.__file__).parents[2],  # google/rpc
    ]
    # The mypy plugins are scripts beside this interpreter, which need not be on PATH.
    plugins = [
        f"--plugin={name}={Path(sys.executable).with_name(name)}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        *(f"-I{include}" for include in includes),
        *plugins,
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
        *protos,
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit("protoc refused the protos (above)")
    made = target / "penstock"
    for package in sorted({path.parent for path in made.rglob("*_pb2.py")}):
        name = ".".join(package.relative_to(target).parts)
        (package / "__init__.py").write_text(f'"""Generated from the protos of {name}."""\n', encoding="utf-8")
        # The area is a package of its own too; `penstock` above it never is (it is shared by several distributions).
        (package.parent / "__init__.py").write_text('"""Generated."""\n', encoding="utf-8")
        (package.parent / "py.typed").touch()
    return {str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*") if path.is_file()}


def main() -> None:
    """Writes or checks; see the module's text."""
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(Path(scratch))
    committed = {
        str(path.relative_to(STUBS)): path.read_bytes()
        for path in STUBS.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    differing = sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))
    if "--check" in sys.argv[1:]:
        if differing:
            sys.exit(
                "generated code differs from the protos; run `make protos` and commit:\n  " + "\n  ".join(differing)
            )
        return
    for name in differing:
        path = STUBS / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made[name])
        else:
            path.unlink()
    print(f"{len(made)} files under {STUBS.relative_to(ROOT)}, {len(differing)} changed")


if __name__ == "__main__":
    main()
