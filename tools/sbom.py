"""The bill of materials of what `make dist` builds: CycloneDX 1.6, from the metadata of what the build had installed.

Each distribution has what it needs to run, with extras, by the versions that the tests passed with (constraints.txt).
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.names import PYTHON, ROOT, names


def version() -> str:
    """Returns the version of this checkout."""
    found: str = _project("clients/python/sdk")["version"]
    return found


def bill(folder: Path) -> dict[str, Any]:
    """Returns the bill of the archives in the folder."""
    ours = [str(canonicalize_name(_project(place)["name"])) for place in PYTHON]
    components: dict[str, dict[str, Any]] = {}
    depends: dict[str, list[str]] = {}
    waiting = [*ours]
    while waiting:
        name = waiting.pop()
        reference = _python(name)
        if reference in depends:
            continue
        components[reference] = _component(name, reference, folder if name in ours else None)
        needed = sorted({str(canonicalize_name(item.name)) for item in _requirements(name, extras=name in ours)})
        depends[reference] = [_python(item) for item in needed]
        waiting += needed
    for reference, component, needed in (_npm(folder), _go(folder), _protos(folder)):
        components[reference] = component
        depends[reference] = list(needed)
        components |= {item: _bare(item) for item in needed}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": names()["python"], "version": version()}},
        "components": [components[key] for key in sorted(components)],
        "dependencies": [{"ref": key, "dependsOn": depends[key]} for key in sorted(depends)],
    }


def _project(place: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / place / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def _python(name: str) -> str:
    return f"pkg:pypi/{name}@{metadata.version(name)}"


def _requirements(name: str, *, extras: bool) -> Iterator[Requirement]:
    """What a distribution needs here, those of its extras included that are installed."""
    chosen = {"", *(metadata.metadata(name).get_all("Provides-Extra") or ())} if extras else {""}
    for text in metadata.requires(name) or ():
        item = Requirement(text)
        wanted = item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in chosen)
        if wanted and _installed(item.name):
            yield item


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _component(name: str, reference: str, folder: Path | None) -> dict[str, Any]:
    found = metadata.metadata(name)
    (expression,), (licence,) = (found.get_all(key) or [""] for key in ("License-Expression", "License"))
    made: dict[str, Any] = {"type": "library", "bom-ref": reference, "purl": reference, "name": name}
    made["version"] = metadata.version(name)
    if expression:
        made["licenses"] = [{"expression": expression}]
    elif licence and "\n" not in licence:
        made["licenses"] = [{"license": {"name": licence}}]
    if folder is not None:
        archives = sorted(folder.glob(f"{name.replace('-', '_')}-{made['version']}*"))
        made["externalReferences"] = [_archive(path) for path in archives]
    return made


def _archive(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"type": "distribution", "url": path.name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _bare(reference: str) -> dict[str, Any]:
    name, _, number = reference.partition("/")[2].rpartition("@")
    return {
        "type": "library",
        "bom-ref": reference,
        "purl": reference,
        "name": name.replace("%40", "@"),
        "version": number,
    }


def _npm(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    lock = json.loads((ROOT / "clients" / "typescript" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    needed = [
        f"pkg:npm/{place.removeprefix('node_modules/').replace('@', '%40')}@{item['version']}"
        for place, item in lock.items()
        if place and not item.get("dev")
    ]
    reference = f"pkg:npm/{names()['npm'].replace('@', '%40')}@{lock['']['version']}"
    made = _bare(reference) | {"licenses": [{"expression": lock[""]["license"]}]}
    made["externalReferences"] = [_archive(path) for path in sorted(folder.glob("*.tgz"))]
    return reference, made, needed


def _go(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    text = (ROOT / "clients" / "go" / "go.mod").read_text(encoding="utf-8")
    needed = [f"pkg:golang/{name}@{number}" for name, number in re.findall(r"^\t(\S+) (v\S+)", text, re.MULTILINE)]
    reference = f"pkg:golang/{names()['go']}@v{version()}"
    made = _bare(reference) | {"licenses": [{"expression": "Apache-2.0"}]}
    made["externalReferences"] = [_archive(path) for path in sorted(folder.glob("penstock-go-*.zip"))]
    return reference, made, needed


def _protos(folder: Path) -> tuple[str, dict[str, Any], list[str]]:
    reference = f"pkg:generic/{names()['python']}-proto-files@v{version()}"
    made = _bare(reference) | {"licenses": [{"expression": "Apache-2.0"}]}
    made["externalReferences"] = [_archive(path) for path in sorted(folder.glob("penstock-proto-files-*.zip"))]
    return reference, made, []
