"""Values of toolboxes: programs that the sandbox service installs once and mounts read-only in sandboxes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Runtime:
    """A language runtime that a toolbox needs.

    Attributes:
        kind: python or node.
        min_version: the lowest version, for example "20.0"; empty = any.
        below_version: the first version that is too new; empty = none.
    """

    kind: str
    min_version: str = ""
    below_version: str = ""


@dataclass(frozen=True, slots=True)
class ToolboxFile:
    """A file of a toolbox; `path` is relative to it, programs go under bin/. `mode` None = 0644, under bin/ 0755."""

    path: str
    content: bytes = field(repr=False)
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class PythonTarget:
    """The Python of sandboxes for which packages are installed.

    Attributes:
        version: its minor version, for example "3.12".
        platform: the newest platform of wheels that it takes, for example "manylinux_2_36_x86_64".
    """

    version: str
    platform: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolboxSpec:
    """The content of a toolbox; equal content has one toolbox.

    Attributes:
        name: names the mount path /opt/penstock/toolboxes/NAME.
        runtimes: that its programs need.
        npm_packages: exact versions, as NAME@VERSION.
        python_packages: all of them, dependencies included, each as NAME==VERSION --hash=sha256:HEX. Wheels only.
        files: further files.
        path_directories: for PATH, relative to the toolbox; bin and node_modules/.bin always follow.
        npm_lock: the content of a package-lock.json, instead of `npm_packages`.
        python_target: the packages are for this Python, the sandbox's own, which then finds them; None = for a Python
            of the service, and for the toolbox alone.
        debian_lock: lines NAME=VERSION PATH --hash=sha256:HEX of Debian packages, whose files sandboxes have under
            their root; for backends with `debian_packages`.
    """

    name: str
    runtimes: Sequence[Runtime] = ()
    npm_packages: Sequence[str] = ()
    python_packages: Sequence[str] = ()
    files: Sequence[ToolboxFile] = ()
    path_directories: Sequence[str] = ()
    npm_lock: str = ""
    python_target: PythonTarget | None = None
    debian_lock: str = ""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """An installed toolbox; `mount_path` is its path in sandboxes. Its id goes into `SandboxSpec.toolbox_ids`."""

    toolbox_id: str
    name: str
    mount_path: str
    size_bytes: int
    create_time: datetime | None
    namespace: str = "default"
    service: str = ""
    """Name of the sandbox service that has it; empty: an older one."""
