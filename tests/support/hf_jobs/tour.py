"""What the unmodified SDK does with a sandbox, told as a line of JSON: run with the environment of `client.HfJobs`."""

from __future__ import annotations

import json
import sys
from typing import Any


def hub() -> dict[str, Any]:
    """A tour through `huggingface_hub.Sandbox`."""
    from huggingface_hub import Sandbox
    from huggingface_hub.errors import SandboxError

    told: dict[str, Any] = {}
    sandbox = Sandbox.create(labels={"tour": "1"}, idle_timeout=None)
    try:
        told["hello"] = sandbox.run("echo out; echo err >&2; exit 3", check=False).__dict__
        told["stdin"] = sandbox.run(["tr", "a-z", "A-Z"], stdin="héllo").stdout
        pieces: list[str] = []
        sandbox.run("for n in 1 2 3; do echo $n; done", on_stdout=pieces.append, capture_output=False)
        told["streamed"] = "".join(pieces)
        late = sandbox.run("sleep 30", timeout=0.2, check=False)
        told["timed_out"] = late.timed_out
        try:
            sandbox.run(["no-such-program"])
        except SandboxError as error:
            told["missing"] = error.status_code
        told["token"] = sandbox.run(
            "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c ^SBX_TOKEN= || true"
        ).stdout
        data = bytes(range(256)) * 16384
        sandbox.files.write("/srv/deep/down/file", data)
        told["file"] = sandbox.files.read("/srv/deep/down/file") == data
        told["listed"] = [entry.name for entry in sandbox.files.list("/srv/deep")]
        process = sandbox.run("sleep 100", background=True)
        told["background"] = [one.running for one in sandbox.processes()]
        told["killed"] = process.kill()
        told["again"] = Sandbox.connect(sandbox.id).run("id -u").stdout
    finally:
        sandbox.kill()
    try:
        Sandbox.connect(sandbox.id)
    except SandboxError as error:
        told["after"] = str(error)
    return told


def classic() -> dict[str, Any]:
    """A tour through `hf_sandbox.Sandbox`."""
    from hf_sandbox import Sandbox

    told: dict[str, Any] = {}
    sandbox = Sandbox.create("python:3.12", timeout="5m")
    try:
        done = sandbox.exec("/bin/sh", "-c", "cat; echo err >&2; exit 3", stdin="hello")
        told["hello"] = [done.returncode, done.stdout, done.stderr]
        sandbox.write_file("/tmp/file", b"\0\xff")
        told["file"] = list(sandbox.read_file("/tmp/file", text=False))
    finally:
        sandbox.terminate()
    return told


if __name__ == "__main__":
    print(json.dumps({"hub": hub, "classic": classic}[sys.argv[1]]()))
