"""What makes two snapshots the same: the hash of everything that goes into one.

Invariants: the same spec has the same key for as long as the service runs, and after a restart as well unless it holds
a secret; no key tells anything of a secret's value, not even to who guesses it: what it is mixed with is kept nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from penstock_sandbox.model import Command, SeedFile, SnapshotSpec

_SALT = secrets.token_bytes(16)


def key_of(spec: SnapshotSpec) -> str:
    """The content hash of a spec."""
    sandbox = spec.sandbox
    content = repr(
        (
            (sandbox.backend, sandbox.image, sandbox.snapshot_id, sandbox.resources, sandbox.network),
            (sorted(sandbox.env.items()), sandbox.toolbox_ids, sandbox.user),
            [_file_key(file) for file in spec.files],
            [_command_key(command) for command in spec.setup],
        )
    )
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()


def _command_key(command: Command) -> tuple[object, ...]:
    secret = repr(sorted(command.secret_env.items())).encode(errors="surrogateescape")
    return (
        command.argv,
        command.shell,
        sorted(command.env.items()),
        hmac.digest(_SALT, secret, "sha256").hex() if command.secret_env else "",
        command.cwd,
        command.user,
        command.timeout_s,
    )


def _file_key(file: SeedFile) -> tuple[str, str, int]:
    return file.path, hashlib.sha256(file.content).hexdigest(), file.mode
