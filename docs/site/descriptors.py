"""The protos as the compiler sees them, with their comments."""

from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]

MESSAGE, ENUM, SERVICE = 4, 5, 6
"""Field numbers in FileDescriptorProto, of which a comment's path is made."""
METHOD, FIELD, VALUE, NESTED_MESSAGE, NESTED_ENUM, ONEOF = 2, 2, 2, 3, 4, 8
"""Field numbers in ServiceDescriptorProto, DescriptorProto and EnumDescriptorProto, likewise."""


@cache
def descriptors() -> FileDescriptorSet:
    """All protos, compiled with their comments, in the order of their paths."""
    protos = ROOT / "protos"
    files = sorted(path.relative_to(protos).as_posix() for path in protos.rglob("*.proto"))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "protos.bin"
        wellknown = str(resources.files("grpc_tools") / "_proto")
        options = [f"-I{protos}", f"-I{wellknown}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, *files]):
            raise SystemExit("protoc refused the protos (above)")
        return FileDescriptorSet.FromString(out.read_bytes())


def rpcs() -> Iterator[tuple[str, str, str]]:
    """(package, service, RPC) of everything that is declared."""
    for file in descriptors().file:
        for service in file.service:
            for method in service.method:
                yield file.package, service.name, method.name


def comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """The comment that stands above each thing, by its path, without the one space behind `//`."""
    return {
        tuple(location.path): "\n".join(line.removeprefix(" ") for line in location.leading_comments.splitlines())
        for location in file.source_code_info.location
        if location.leading_comments
    }
