"""The protocol reference: a page for each package of the protos, made of their comments and the services' roles.

Everything that a proto declares is on its package's page, once, under its own name: services with each RPC's signature,
roles, promises and error reasons; messages with their fields; enums with their values. Names of other messages and of
error reasons are links. What is not in a proto or in a table of roles is not here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from docs.site import descriptors
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)

from penstock.options.v1 import options_pb2
from penstock_chassis import operations
from penstock_chassis.auth import RoleTable
from penstock_driver import app as driver
from penstock_inference import app as inference
from penstock_interception import app as interception
from penstock_sandbox import app as sandbox

ABOUT: Mapping[str, str] = {
    "penstock.chat.v1": "messages, tools, sampling and completions: what the other packages say",
    "penstock.driver.v1": "rollouts, groups, agents and terminal episodes",
    "penstock.inference.v1": "the engine: tokens in, tokens and logprobs out; weights, versions, adapters",
    "penstock.interception.v1": "the gate: model calls to trainers and back; rollouts, captures, host tools",
    "penstock.ops.v1": "what every service says of itself: how it fares, and what is wrong",
    "penstock.options.v1": "what the protos say of their own fields and RPCs: credentials, routes, what is provisional",
    "penstock.sandbox.v1": "sandboxes, processes, files, toolboxes",
    "penstock.trajectory.v1": "what comes out: calls, branches, samples, grades",
}
ROLES = RoleTable({**sandbox.ROLES, **driver.ROLES, **interception.ROLES, **inference.ROLES, **operations.ROLES})

_PROVISIONAL = "**[Provisional](../compatibility.md#provisional)**: not served yet. Feature: `{}`"
_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in FieldDescriptorProto.Type.items()  # scalars are named there as protos name them
}
_CODE = re.compile(r"(`[^`\n]*`)")
_NAME = re.compile(r"\b[A-Z][A-Za-z]+(?:\.[A-Z][A-Za-z]+)?\b")
_REASON = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9]\b")
_RESERVED = str.maketrans({"*": r"\*", "<": "&lt;", "[": r"\[", "]": r"\]"})

Links = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Named:
    """A message or enum: its name within its package (`Outer.Inner`), the path of its comment, and itself."""

    name: str
    path: tuple[int, ...]
    item: DescriptorProto | EnumDescriptorProto


def pages(reasons: Iterable[str]) -> dict[str, str]:
    """The pages by their paths below reference/; `reasons` are those that errors.md explains, which become links."""
    by_package: dict[str, list[FileDescriptorProto]] = {}
    for file in descriptors.descriptors().file:
        by_package.setdefault(file.package, []).append(file)
    for package, files in by_package.items():
        area = package.split(".")[1]  # the service that gives a package its name comes first
        files.sort(key=lambda file: (not file.name.endswith(f"/{area}_service.proto"), file.name))
    link = partial(_linked, _targets(), frozenset(reasons))
    made = {page_of(package): "\n".join(_page(package, files, link)) for package, files in by_package.items()}
    return made | {"index.md": "\n".join(_index(by_package))}


def page_of(package: str) -> str:
    """`sandbox.md` of `penstock.sandbox.v1`."""
    return f"{package.split('.')[1]}.md"


def _targets() -> dict[str, str]:
    """Where each thing is explained, by full name (`.penstock.sandbox.v1.Command`) and by name alone."""
    found: dict[str, str] = {}
    for file in descriptors.descriptors().file:
        page = page_of(file.package)
        for named in _declared(file):
            found[f".{file.package}.{named.name}"] = f"{page}#{_anchor(named.name)}"
            found.setdefault(named.name, f"{page}#{_anchor(named.name)}")
        for service in file.service:
            found[service.name] = f"{page}#{_anchor(service.name)}"
            for method in service.method:
                target = f"{page}#{_anchor(f'{service.name}.{method.name}')}"
                found[f"{service.name}.{method.name}"] = target
                found.setdefault(method.name, target)
    return found


def _declared(file: FileDescriptorProto) -> Iterator[Named]:
    for index, enum in enumerate(file.enum_type):
        yield Named(enum.name, (descriptors.ENUM, index), enum)
    for index, message in enumerate(file.message_type):
        yield from _within(message, message.name, (descriptors.MESSAGE, index))


def _within(message: DescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[Named]:
    yield Named(name, path, message)
    for index, enum in enumerate(message.enum_type):
        yield Named(f"{name}.{enum.name}", (*path, descriptors.NESTED_ENUM, index), enum)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _within(nested, f"{name}.{nested.name}", (*path, descriptors.NESTED_MESSAGE, index))


def _index(by_package: Mapping[str, list[FileDescriptorProto]]) -> Iterator[str]:
    yield "# The protocol\n"
    yield (
        "Four gRPC services meet in these protos and nowhere else. Each page is made from a package's comments, which"
        " are the specification: what an RPC promises, who may call it, its errors and when, what a repeated call"
        " means. [Errors](../errors.md) says what to do about each reason, [interfaces](../interfaces.md) where each"
        " service listens.\n"
    )
    yield "| package | has | services |\n|---|---|---|"
    for package in sorted(by_package):
        services = [service.name for file in by_package[package] for service in file.service]
        page = page_of(package)
        links = ", ".join(f"[{name}]({page}#{_anchor(name)})" for name in services)
        yield f"| [{package}]({page}) | {ABOUT[package]} | {links or '-'} |"
    yield "\n## Every RPC\n"
    yield "| RPC | may be called by |\n|---|---|"
    for package, service, method in descriptors.rpcs():
        target = f"{page_of(package)}#{_anchor(f'{service}.{method}')}"
        yield f"| [{service}.{method}]({target}) | {_roles(package, service, method)} |"


def _page(package: str, files: list[FileDescriptorProto], link: Links) -> Iterator[str]:
    yield f"# {package}\n"
    yield f"{ABOUT[package][0].upper()}{ABOUT[package][1:]}.\n"
    for file in files:
        said = descriptors.comments(file)
        for index, service in enumerate(file.service):
            path = (descriptors.SERVICE, index)
            yield f"## {service.name} {{ #{_anchor(service.name)} }}\n"
            yield link(_paragraphs(said.get(path, "")))
            for position, method in enumerate(service.method):
                yield f"### {method.name} {{ #{_anchor(f'{service.name}.{method.name}')} }}\n"
                yield _signature(method, link)
                yield f"Roles: {_roles(package, service.name, method.name)}.\n"
                if feature := method.options.Extensions[options_pb2.provisional_method]:
                    yield f"{_PROVISIONAL.format(feature)}.\n"
                yield link(_paragraphs(said.get((*path, descriptors.METHOD, position), "")))
    for kind, title in ((DescriptorProto, "Messages"), (EnumDescriptorProto, "Enums")):
        found = [(file, named) for file in files for named in _declared(file) if isinstance(named.item, kind)]
        if found:
            yield f"## {title}\n"
        for file, named in sorted(found, key=lambda pair: pair[1].name):
            yield from _message(file, named, link)


def _message(file: FileDescriptorProto, named: Named, link: Links) -> Iterator[str]:
    said = descriptors.comments(file)
    yield f"### {named.name} {{ #{_anchor(named.name)} }}\n"
    yield link(_paragraphs(said.get(named.path, "")))
    if isinstance(named.item, EnumDescriptorProto):
        yield "| value | number | meaning |\n|---|---|---|"
        for index, value in enumerate(named.item.value):
            meaning = link(_cell(said.get((*named.path, descriptors.VALUE, index), "")))
            yield f"| `{value.name}` | {value.number} | {meaning} |"
    elif named.item.field:
        yield "| field | type | number | meaning |\n|---|---|---|---|"
        for index, field in enumerate(named.item.field):
            meaning = link(_cell(said.get((*named.path, descriptors.FIELD, index), "")))
            if feature := field.options.Extensions[options_pb2.provisional]:
                meaning = f"{_PROVISIONAL.format(feature)}. {meaning}"
            yield f"| `{field.name}` | {_type(named.item, field, link)} | {field.number} | {meaning} |"
        for index, choice in enumerate(named.item.oneof_decl):
            if comment := said.get((*named.path, descriptors.ONEOF, index)):
                yield f"\nOf `{choice.name}`: {link(_cell(comment))}"
    yield ""


def _signature(method: MethodDescriptorProto, link: Links) -> str:
    def side(name: str, stream: bool) -> str:
        return f"{'stream ' if stream else ''}{_type_link(name, link)}"

    asked = side(method.input_type, method.client_streaming)
    return f"{asked} → {side(method.output_type, method.server_streaming)}  "


def _roles(package: str, service: str, method: str) -> str:
    return ", ".join(
        sorted(ROLES.allowed(f"{package}.{service}/{method}"), key=("operator", "trainer", "observer").index)
    )


def _type(message: DescriptorProto, field: FieldDescriptorProto, link: Links) -> str:
    entry = next(
        (item for item in message.nested_type if field.type_name.endswith(f".{message.name}.{item.name}")), None
    )
    if entry is not None and entry.options.map_entry:
        key, value = (_type(entry, item, link) for item in entry.field)
        return f"map of {key} to {value}"
    named = _type_link(field.type_name, link) if field.type_name else f"`{_TYPES[field.type]}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {named}"
    if field.proto3_optional:
        return f"optional {named}"
    if field.HasField("oneof_index"):
        return f"{named}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return named


def _type_link(full: str, link: Links) -> str:
    if full.startswith(".google."):
        return f"`{full.removeprefix('.')}`"
    return link(full)


def _paragraphs(comment: str) -> str:
    """A comment as Markdown: its paragraphs and lists, with what Markdown would take for its own marks."""
    parts = [part if index % 2 else part.translate(_RESERVED) for index, part in enumerate(_CODE.split(comment))]
    text = "".join(parts)
    text = re.sub(r"(?m)^(?!- )(.*)\n(?=- )", r"\1\n\n", text)
    return re.sub(r"(?m)^Errors: ", "\n**Errors:** ", text).strip() + "\n"


def _cell(comment: str) -> str:
    return " ".join(_paragraphs(comment).split()).replace("|", r"\|")


def _linked(targets: Mapping[str, str], reasons: frozenset[str], text: str) -> str:
    """The text with names of messages, RPCs and reasons as links; of a full name its last part is shown."""
    if text.startswith(".penstock."):
        name = text.split(".v1.", 1)[1]
        return f"[{name}]({targets[text]})"

    def of_name(match: re.Match[str]) -> str:
        name = match[0]
        compound = "." in name or sum(letter.isupper() for letter in name) > 1
        return f"[{name}]({targets[name]})" if compound and name in targets else name

    def of_reason(match: re.Match[str]) -> str:
        return f"[{match[0]}](../errors.md#{match[0]})" if match[0] in reasons else match[0]

    parts = _CODE.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = _REASON.sub(of_reason, _NAME.sub(of_name, parts[index]))
    return "".join(parts)


def _anchor(name: str) -> str:
    return name.lower()
