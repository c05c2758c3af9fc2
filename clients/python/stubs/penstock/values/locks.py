"""Reads locks of packages: pip's requirements files with hashes, npm's package-lock.json, and lists of Debian packages.

Locks come from tasks, whose authors may be strangers, and are installed outside of sandboxes: what is not plainly a
package of an index, with its version and hash, is refused. Clients, the driver and the sandbox service read them alike.

Invariants: nothing that is read here names an address, a file or an option of an installer; the time is linear in the
size of the lock.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_LOCK_BYTES: Final = 2 << 20
MAX_PACKAGES: Final = 5000
MAX_DEBIAN_PACKAGES: Final = 256
_MAX_DEPTH: Final = 16
"""Of values in a package-lock.json. What is deeper is in no such file, and could exhaust a reader's stack."""
_SHOWN: Final = 80

_REQUIREMENT: Final = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[[A-Za-z0-9._, -]*\])?\s*==\s*([0-9][A-Za-z0-9.!+-]*)"
)
_HASH: Final = re.compile(r"hash(?:=|\s+)(sha256:[0-9a-f]{64})")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
_MARKER: Final = re.compile(r"""[A-Za-z0-9_.()<>=!~'", +-]{1,500}""")
_HOW_PYTHON: Final = "make the lock with `uv pip compile --generate-hashes` or `pip-compile --generate-hashes`"

_NPM_NAME: Final = r"(?:@[A-Za-z0-9_~][A-Za-z0-9._~-]*/)?[A-Za-z0-9_~][A-Za-z0-9._~-]*"
_NPM_PLACE: Final = re.compile(rf"node_modules/{_NPM_NAME}(?:/node_modules/{_NPM_NAME})*")
_NPM_PACKAGE: Final = re.compile(_NPM_NAME)
_NPM_VERSION: Final = re.compile(r"[0-9][A-Za-z0-9.+-]*")
_INTEGRITY: Final = re.compile(r"(?:sha512-[A-Za-z0-9+/]{86}==|sha384-[A-Za-z0-9+/]{64}|sha256-[A-Za-z0-9+/]{43}=)")
# No address, path, or name of an archive: npm would fetch those from where they say.
_RANGE: Final = re.compile(rf"(?:npm:{_NPM_NAME}@)?(?!\.)[A-Za-z0-9 .+*^~<>=|_-]*")
_ARCHIVES: Final = (".tgz", ".tar", ".tar.gz")
_RANGES: Final = ("dependencies", "devDependencies", "optionalDependencies", "peerDependencies")
_PLAIN: Final = ("version", "dev", "optional", "devOptional", "peer", "inBundle", "hasInstallScript", "engines")
_LISTS: Final = ("os", "cpu", "libc", "bundleDependencies")
_DEBIAN: Final = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9+.-]{1,127})=(?P<version>[0-9][A-Za-z0-9.+:~-]{0,127}) "
    # Each part of the path begins with a letter or a digit: it leads nowhere but down.
    r"(?P<path>(?:[A-Za-z0-9][A-Za-z0-9.+~_-]{0,127}/){0,16}"
    r"[A-Za-z0-9][A-Za-z0-9.+~_-]{0,250}_(?P<machine>[a-z0-9-]{1,32})\.deb) "
    r"--hash=sha256:(?P<sha256>[0-9a-f]{64})"
)
_HOW_DEBIAN: Final = "make the lock with `penstock tasks lock`"
_HOW_NPM: Final = "make the lock with `npm install --package-lock-only`"


class LockProblem(ValueError):
    """A lock is refused; the text names the line or the package, and the reason."""


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """A Python package of one version. `marker` is the condition under which it is installed, empty if always."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """Each as sha256:HEX; at least one."""
    marker: str = ""

    @property
    def line(self) -> str:
        """The package as a line of a requirements file, without its marker."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash={value}" for value in self.hashes)])


@dataclass(frozen=True, slots=True)
class NpmLock:
    """A package-lock.json, and the package.json that it is the lock of. Neither has an address."""

    manifest: str
    lock: str
    packages: int
    with_scripts: tuple[str, ...]
    """Places of the packages that have install scripts, which are not run."""


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """A Debian package of one version: a file of a mirror, by its path there and its SHA-256 in hex."""

    name: str
    version: str
    path: str
    machine: str
    """Debian's name of the architecture, or "all"."""
    sha256: str

    @property
    def line(self) -> str:
        """The package as a line of a lock."""
        return f"{self.name}={self.version} {self.path} --hash=sha256:{self.sha256}"


def debian_lock(text: str) -> tuple[DebianPackage, ...]:
    """Returns the packages of a list of Debian packages, in its order.

    Raises:
        LockProblem: it is too large, empty, names a package twice, or has a line of another form.
    """
    _check_size(text)
    found: dict[str, DebianPackage] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        read = _DEBIAN.fullmatch(line.rstrip())
        if read is None:
            raise LockProblem(
                f"line {number}: {_shown(line)} is not NAME=VERSION PATH.deb --hash=sha256:HEX: {_HOW_DEBIAN}"
            )
        package = DebianPackage(**read.groupdict())
        if package.name in found:
            raise LockProblem(f"line {number}: {package.name} is named twice")
        if len(found) == MAX_DEBIAN_PACKAGES:
            raise LockProblem(f"line {number}: there are more than {MAX_DEBIAN_PACKAGES} packages")
        found[package.name] = package
    if not found:
        raise LockProblem("names no package")
    return tuple(found.values())


def python_lock(text: str) -> tuple[PinnedPackage, ...]:
    """Returns the packages of a requirements file with hashes, in its order.

    Raises:
        LockProblem: it is too large, empty, or has a line that is not NAME==VERSION with hashes.
    """
    _check_size(text)
    found: list[PinnedPackage] = []
    for number, line in _logical_lines(text):
        if len(found) == MAX_PACKAGES:
            raise LockProblem(f"line {number}: there are more than {MAX_PACKAGES} packages")
        found.append(_pinned(line, number))
    if not found:
        raise LockProblem("names no package")
    return tuple(found)


def npm_lock(text: str) -> NpmLock:
    """Returns a package-lock.json without what is of no use to an installation, above all without its addresses.

    Raises:
        LockProblem: it is too large, of an older form, or has something that is not a package of a registry.
    """
    _check_size(text)
    try:
        whole = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        raise LockProblem("is not JSON") from None
    if not isinstance(whole, dict) or whole.get("lockfileVersion") not in (2, 3):
        raise LockProblem("is not a package-lock.json of lockfileVersion 2 or 3: run `npm install` with npm 7 or newer")
    given = whole.get("packages")
    if not isinstance(given, dict) or not isinstance(given.get(""), dict):
        raise LockProblem(f'has no "packages" with the project itself: {_HOW_NPM}')
    if len(given) - 1 > MAX_PACKAGES:
        raise LockProblem(f"there are more than {MAX_PACKAGES} packages")
    if len(given) == 1:
        raise LockProblem("names no package")
    root: dict[str, Any] = {"name": "task", "version": "0.0.0"} | _ranges("the project", given[""])
    packages = {place: _npm_package(place, entry) for place, entry in given.items() if place}
    lock = {
        "name": "task",
        "version": "0.0.0",
        "lockfileVersion": 3,
        "requires": True,
        "packages": {"": root, **packages},
    }
    scripts = tuple(place for place, entry in packages.items() if entry.get("hasInstallScript"))
    return NpmLock(json.dumps(root), json.dumps(lock), len(packages), scripts)


def _check_size(text: str) -> None:
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_LOCK_BYTES:
        raise LockProblem(f"has {size} bytes; at most {MAX_LOCK_BYTES} are allowed")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields a requirements file's lines with the number of their first, joined and without comments, as pip does."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if parts else number
        is_comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not is_comment:
            parts.append(line[:-1])
            continue
        parts.append(" " + line if is_comment else line)
        whole = _COMMENT.sub("", "".join(parts)).strip()
        parts = []
        if whole:
            yield first, whole
    if whole := _COMMENT.sub("", "".join(parts)).strip():
        yield first, whole


def _pinned(line: str, number: int) -> PinnedPackage:
    shown = _shown(line)
    if line.startswith("-"):
        raise LockProblem(
            f"line {number}: {shown} is an option: indexes and options are those of the sandbox service's settings"
        )
    head, *options = re.split(r"\s--", line)
    wanted, _, marker = (part.strip() for part in head.partition(";"))
    found = _REQUIREMENT.fullmatch(wanted) if len(wanted) <= 500 else None
    if found is None:
        raise LockProblem(f"line {number}: {shown} is not NAME==VERSION: {_HOW_PYTHON}")
    if marker and not _MARKER.fullmatch(marker):
        raise LockProblem(f"line {number}: {_shown(marker)} is not a condition such as python_version < '3.11'")
    hashes = []
    for option in options:
        value = _HASH.fullmatch(option.strip())
        if value is None:
            raise LockProblem(f"line {number}: --{_shown(option)} is not --hash=sha256: and 64 hexadecimal digits")
        hashes.append(value[1])
    if not hashes:
        raise LockProblem(f"line {number}: {found[1]} has no --hash=sha256:...: {_HOW_PYTHON}")
    return PinnedPackage(found[1], found[2], tuple(hashes), marker)


def _npm_package(place: str, entry: Any) -> dict[str, Any]:
    where = _shown(place)
    if not _NPM_PLACE.fullmatch(place):
        raise LockProblem(f"{where} is not below node_modules/: packages of a workspace cannot be installed")
    if not isinstance(entry, dict) or _depth(entry) > _MAX_DEPTH:
        raise LockProblem(f"{where} is not a package's entry")
    if entry.get("link"):
        raise LockProblem(f"{where} is a link: only packages of a registry can be installed")
    if not _NPM_VERSION.fullmatch(str(entry.get("version", ""))):
        raise LockProblem(f"{where} has no version of a registry")
    integrity = entry.get("integrity")
    if integrity is None and entry.get("inBundle") is not True:
        raise LockProblem(f"{where} has no integrity: {_HOW_NPM}")
    made = {name: entry[name] for name in _PLAIN if name in entry} | _ranges(where, entry)
    for name in _LISTS:
        if isinstance(value := entry.get(name), list) and all(isinstance(item, str) for item in value):
            made[name] = value
    if integrity is not None:
        hashes = [item for item in str(integrity).split() if _INTEGRITY.fullmatch(item)]
        if not hashes:
            raise LockProblem(f"{where} has no integrity by SHA-256 or stronger: {_HOW_NPM}")
        made["integrity"] = " ".join(hashes)
    if (alias := entry.get("name")) is not None:
        if not isinstance(alias, str) or not _NPM_PACKAGE.fullmatch(alias):
            raise LockProblem(f"{where}: {_shown(str(alias))} is not a package's name")
        made["name"] = alias
    if (bins := entry.get("bin")) is not None:
        made["bin"] = _bins(where, bins)
    return made


def _ranges(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in _RANGES:
        given = entry.get(kind)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise LockProblem(f"{where}: {kind} is not a mapping")
        for name, wanted in given.items():
            if not _NPM_PACKAGE.fullmatch(name):
                raise LockProblem(f"{where}: {_shown(name)} is not a package's name")
            if not isinstance(wanted, str) or not _RANGE.fullmatch(wanted) or wanted.endswith(_ARCHIVES):
                raise LockProblem(
                    f"{where}: {kind}: {name} is {_shown(str(wanted))}: only packages of a registry can be installed"
                )
        found[kind] = given
    optional = entry.get("peerDependenciesMeta")
    if isinstance(optional, dict):
        found["peerDependenciesMeta"] = {
            name: {"optional": isinstance(value, dict) and value.get("optional") is True}
            for name, value in optional.items()
        }
    return found


def _bins(where: str, bins: Any) -> dict[str, str]:
    if not isinstance(bins, dict):
        raise LockProblem(f"{where}: bin is not a mapping")
    for name, path in bins.items():
        plain = re.fullmatch(r"[A-Za-z0-9_@+-][A-Za-z0-9._@+-]*", name)
        inside = isinstance(path, str) and path and not path.startswith("/") and ".." not in re.split(r"[/\\]", path)
        if not plain or not inside or "\0" in path:
            raise LockProblem(f"{where}: bin {_shown(name)} leads out of the package")
    return dict(bins)


def _depth(value: Any) -> int:
    """Returns how deep the value is nested, at most one more than what is allowed."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    return depth


def _not_json(name: str) -> None:
    raise ValueError(name)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
