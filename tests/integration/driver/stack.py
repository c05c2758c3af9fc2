"""The real services around the driver, as processes on free ports: interception, sandbox, driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

TOKEN = "operator-token-of-this-test"


class Process:
    """One service; `kill()` and `start()` again keep its state, its port and its settings."""

    def __init__(self, name: str, directory: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._settings = {"operator_token": TOKEN, "state_dir": str(directory / name), "port": "0", **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.endpoints: dict[str, str] = {}

    def start(self) -> None:
        """Start it and wait for its line of readiness."""
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | {
            f"PENSTOCK_{self.name}_{key}".upper(): value for key, value in self._settings.items()
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"penstock_{self.name}"], env=environment, stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"{self.name} did not start: {self.log.read_text()[-4000:]}"
        ready = json.loads(line)
        self.address, self.endpoints = ready["address"], ready["endpoints"]
        self._settings["port"] = self.address.rpartition(":")[2]

    def kill(self) -> None:
        """kill -9."""
        assert self._process
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self._process
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


class Stack:
    """Three services that know each other."""

    def __init__(self, directory: Path, tokenizers: Mapping[str, str]) -> None:
        self.directory = directory
        self.interception = Process(
            "interception",
            directory,
            {"ingress_port": "0", "inference_address": "", "tokenizers": json.dumps(dict(tokenizers))},
        )
        self.interception.start()
        ingress = self.interception.endpoints["ingress"]
        self.sandbox = Process("sandbox", directory, {"allowed_upstreams": json.dumps([ingress])})
        self.sandbox.start()
        self.driver = Process(
            "driver",
            directory,
            {
                "sandbox_address": self.sandbox.address,
                "sandbox_token": TOKEN,
                "interception_address": self.interception.address,
                "interception_token": TOKEN,
            },
        )
        self.driver.start()

    def stop(self) -> None:
        """All of them, in order."""
        for process in (self.driver, self.sandbox, self.interception):
            process.stop()


@contextmanager
def running(directory: Path, tokenizers: Mapping[str, str]) -> Iterator[Stack]:
    """The stack, stopped at the end."""
    stack = Stack(directory, tokenizers)
    try:
        yield stack
    finally:
        stack.stop()
