"""Checks that the protos still serve every client of the baseline, the commit that protos/BASELINE names.

    python -m protos.breaking            exit 1 and print what `buf breaking` finds by its FILE rules

docs/compatibility.md says what may change and when BASELINE moves.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
BASELINE: Final = ROOT / "protos" / "BASELINE"
FOUND: Final = 100
"""The exit code of `buf breaking` where it found something."""
BUF: Final = Path(sys.executable).with_name("buf")


def breaking(tree: Path, commit: str) -> str:
    """Returns what breaks clients of a commit, a line each; "" if nothing does.

    Args:
        tree: a directory with buf.yaml and protos/.
        commit: the baseline's hash.

    Raises:
        SystemExit: this is no git checkout, it lacks the commit, or buf cannot read one of the two.
    """
    baseline = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "buf.yaml", "protos"], capture_output=True, check=False
    )
    if baseline.returncode:
        reason = baseline.stderr.decode().strip()
        sys.exit(f"the baseline of the protos cannot be read: {reason}\nIn a shallow clone, run: git fetch --unshallow")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(baseline.stdout)) as archive:
            archive.extractall(scratch, filter="data")
        compared = subprocess.run(
            [str(BUF), "breaking", str(tree), "--against", scratch], capture_output=True, text=True, check=False
        )
    if compared.returncode not in (0, FOUND):
        sys.exit(f"buf cannot compare the protos:\n{compared.stderr}")
    return compared.stdout


def main() -> None:
    """Checks; see the module's text."""
    found = breaking(ROOT, BASELINE.read_text(encoding="utf-8").strip())
    if found:
        sys.exit(f"{found}These changes break clients of the baseline (docs/compatibility.md).")


if __name__ == "__main__":
    main()
