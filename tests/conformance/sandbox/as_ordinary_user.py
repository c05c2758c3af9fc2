"""Runs the sandbox service as an ordinary user (the first argument), for tests that run as root.

The interpreter and the environment of a root's virtual environment may lie under directories that are closed to others.
So they are shown, in a mount namespace of this process, where everybody may read them.
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 0x1000, 0x4000, 0x80000
STAGE = Path("/mnt")


def main() -> None:
    uid = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), what)

    check(libc.unshare(CLONE_NEWNS), "unshare")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "make slave")
    paths = [path for path in sys.path if path and Path(path).is_dir()]
    check(libc.mount(b"stage", str(STAGE).encode(), b"tmpfs", 0, b"mode=755"), "tmpfs")
    shown = []
    for index, path in enumerate([sys.base_prefix, *paths]):
        target = STAGE / str(index)
        target.mkdir()
        check(libc.mount(path.encode(), str(target).encode(), None, MS_BIND | MS_REC, None), f"bind {path}")
        shown.append(str(target))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    python = f"{shown[0]}/bin/python3"
    # The environment's own packages come first, as they did; the standard library is the interpreter's.
    os.environ["PYTHONPATH"] = ":".join(shown[1:])
    os.execv(python, [python, "-m", "penstock_sandbox"])


main()
