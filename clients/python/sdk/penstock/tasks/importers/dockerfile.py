"""The environment of an imported task: an image by name, one that is built, or what its Dockerfile copies.

The Dockerfile is read for backends without images: the files it copies, its working directory and its variables.

Only instructions that such a backend can perform are supported (FROM, WORKDIR, COPY, ENV, and those without effect
there); a task whose Dockerfile runs anything needs an image, and is refused.
"""

import json
import posixpath
import shlex
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.tasks.importers.common import Choices, Folder, Refused, text_of

_WITHOUT_EFFECT: Final = frozenset({"FROM", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "USER", "SHELL"})
_WITH_VARIABLES: Final = frozenset({"WORKDIR", "ENV", "COPY", "ADD"})
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"


@dataclass(slots=True)
class Contents:
    """`copies` are (file or directory in the context, absolute path in the sandbox)."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)


def contents(folder: Path) -> Contents:
    """Returns the content that a directory's Dockerfile puts into its image.

    Raises:
        Refused: it does something that needs an image.
    """
    found = Contents()
    for line in _lines(text_of(folder / "Dockerfile")):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if "$" in rest and word.upper() in _WITH_VARIABLES:
            # Its value is the build's, or that of the image it begins with.
            raise _needs_image(f"has {word.upper()} with a variable")
        match word.upper():
            case "WORKDIR":
                found.workdir = posixpath.normpath(posixpath.join(found.workdir, rest))
            case "ENV":
                found.env |= _variables(rest)
            case "COPY" | "ADD":
                found.copies += _copies(folder, rest, found.workdir, unpacks=word.upper() == "ADD")
            case name if name not in _WITHOUT_EFFECT:
                raise _needs_image(f"has {name}")
    return found


def workdir_of(dockerfile: Path) -> str | None:
    """Returns the working directory that a Dockerfile sets last, as an absolute path; None = none that it shows."""
    found: str | None = None
    for line in _lines(text_of(dockerfile)):
        word, _, rest = line.partition(" ")
        if word.upper() == "FROM":
            found = None
        elif word.upper() == "WORKDIR":
            place = rest.strip().strip("\"'")
            known = "$" not in place and (place.startswith("/") or found is not None)
            found = posixpath.normpath(posixpath.join(found or "/", place)) if known else None
    return found


def _lines(text: str) -> list[str]:
    joined: list[str] = []
    going_on = False
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        whole = line.removesuffix("\\").rstrip()
        if going_on:
            joined[-1] += f" {whole}"
        else:
            joined.append(whole)
        going_on = line.endswith("\\")
    return joined


def _variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: rest.partition(" ")[2].strip()}
    return dict(word.split("=", 1) for word in words if "=" in word)


def _needs_image(what: str) -> Refused:
    return Refused(f"its Dockerfile {what}, which needs an image: import it with images")


def _is_archive(path: Path) -> bool:
    """Returns whether ADD unpacks a file: it goes by the content, not by the name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _ZSTANDARD or tarfile.is_tarfile(path)


def _copies(folder: Path, rest: str, workdir: str, *, unpacks: bool) -> list[tuple[Path, str]]:
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if option := next((word for word in words if word.startswith("--") and not word.startswith("--chown=")), ""):
        raise _needs_image(f"copies with {option}")
    words = [word for word in words if not word.startswith("--")]
    *sources, target = words
    found: list[tuple[Path, str]] = []
    for source in sources:
        matches = (
            sorted(folder.glob(source.removeprefix("./").lstrip("/") or ".")) if source not in (".", "./") else [folder]
        )
        if not matches:
            raise Refused(f"its Dockerfile copies {source}, which does not exist")
        for path in matches:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise Refused(f"its Dockerfile copies {source}, which is outside of its context")
            if unpacks and _is_archive(path):
                raise _needs_image(f"adds {path.name}, which is unpacked")
            place = posixpath.normpath(posixpath.join(workdir, target))
            into = target.endswith("/") or target in (".", "./") or len(sources) > 1 or len(matches) > 1
            found.append((path, posixpath.join(place, path.name) if into and path.is_file() else place))
    return found


def put_environment(folder: Folder, source: Path, image: str, choices: Choices) -> str:
    """Sets the task's sandbox image, build or files; returns the commands' working directory, "" = the image's own."""
    if image and choices.image:
        folder.content["image"] = image
    elif choices.image:
        if not (source / "Dockerfile").is_file():
            raise Refused("it names no image, and has no Dockerfile")
        folder.content["build"] = folder.copy(source, "environment")
    else:
        return _put_files(folder, source)
    user = "root" if choices.user is None else choices.user
    if user:
        folder.content.setdefault("sandbox", {})["user"] = user
    return ""


def _put_files(folder: Folder, source: Path) -> str:
    if not (source / "Dockerfile").is_file():
        raise Refused("it has no Dockerfile to copy files from: import it with its image")
    found = contents(source)
    files: list[dict[str, Any]] = []
    for number, (path, place) in enumerate(found.copies):
        files.append({"path": place, "from": folder.copy(path, f"environment-{number}")})
    if files:
        folder.content["files"] = files
    if found.env:
        folder.content["env"] = found.env
    if found.workdir != "/":
        folder.content["setup"] = [["mkdir", "-p", found.workdir]]
        return found.workdir
    return ""
