#!/usr/bin/env python3
"""Runs a program on each input and keeps what it prints, for nemo_judge.py.

    nemo_run.py PROGRAM INPUTS_JSON RESULTS_JSON SECONDS

A run that fails, takes too long or prints more than a mebibyte has no result.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

MOST = 1 << 20


def printed(program: str, text: str, seconds: float) -> str | None:
    """What the program prints, None without a result."""
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            ["python3", program], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    found, code = None, None
    try:
        found = read(process, time.monotonic() + seconds)
        if found is not None:
            code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        print("it printed all, and did not end")
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return found.decode("utf-8", "replace") if code == 0 and found is not None else None


def read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Everything until the end, None where that is too much or too late."""
    assert process.stdout is not None
    found, pipe = bytearray(), process.stdout.fileno()
    while len(found) <= MOST:
        ready = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return None
        chunk = os.read(pipe, 65536)
        if not chunk:
            return bytes(found)
        found += chunk
    return None


def main() -> None:
    program, inputs, results, seconds = sys.argv[1:]
    with open(inputs, encoding="utf-8") as file:
        given = json.load(file)
    found = [printed(program, text, float(seconds)) for text in given]
    with open(results, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
