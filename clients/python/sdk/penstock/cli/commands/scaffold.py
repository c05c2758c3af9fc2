"""The commented agent spec that `penstock agents new` writes: complete, so that it passes the check unchanged."""

from importlib import resources
from string import Template
from typing import Final

_TOOLBOX: Final = """\
# Installed once and mounted read-only into every sandbox: a rollout installs nothing. No package's code runs meanwhile.
toolbox:
"""
_NPM: Final = """\
  runtimes: [{kind: node, min_version: "20"}]
  npm_packages: ["$package@$version"]
"""
_PYPI: Final = """\
  # The requirements file names every package with its hashes; wheels only:
  #   echo $package==$version | uv pip compile - --generate-hashes --only-binary :all: --no-annotate -o $name.txt
  runtimes: [{kind: python, min_version: "3.11"}]
  python_packages: {from: $name.txt}
"""
_FILES: Final = """\
  # Beside files there are npm_packages (["NAME@VERSION"]) and python_packages ({from: REQUIREMENTS_FILE}, with hashes).
  files:
    # Or `from`, a file beside this one, instead of `content`.
    - path: bin/$name
      mode: 0755
      content: |
        #!/bin/sh
        echo "replace me by the agent" >&2
        exit 1
"""


def scaffold(name: str, file: str, *, npm: str = "", pypi: str = "") -> str:
    """Returns the text of a spec for a package of npm (NAME@VERSION) or PyPI (NAME==VERSION), or for files.

    Raises:
        ValueError: the package has no exact version.
    """
    if npm:
        package, _, version = npm.rpartition("@")
        box, program = _NPM, package.rpartition("/")[2]
    elif pypi:
        package, _, version = pypi.partition("==")
        box, program = _PYPI, f'"{{{{toolbox}}}}/python/bin/{package}"'
    else:
        package, version, box, program = name, "0.1.0", _FILES, name
    if not package or not version[:1].isdigit():
        raise ValueError(f"{npm or pypi} has no exact version: write NAME@VERSION for npm, NAME==VERSION for PyPI")
    values = {"name": name, "file": file, "package": package, "version": version, "program": program}
    whole = resources.files("penstock.cli.commands").joinpath("scaffold.yaml").read_text("utf-8")
    return Template(whole).substitute(values, toolbox=_TOOLBOX + Template(box).substitute(values))
