"""Where things are in a sandbox of this backend."""

from __future__ import annotations

from typing import Final

WORKDIR: Final = "/workspace"
"""The working directory of images that declare none that could be the sandbox's user's."""
OURS: Final = "/opt/penstock"
TOOLBOXES: Final = f"{OURS}/toolboxes"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
