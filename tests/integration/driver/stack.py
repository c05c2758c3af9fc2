"""The real services around the driver, as processes on free ports: interception, sandbox, driver."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.support.endpoints.loopback import unused_port

TOKEN = "operator-token-of-this-test"


class Process:
    """One service; `kill()` and `start()` again keep its state, its port and its settings."""

    def __init__(self, name: str, directory: Path, settings: Mapping[str, str]) -> None:
        self.name = name
        self.module = f"penstock_{name}"
        self.python = sys.executable
        """Whose environment has the service."""
        self.path = ""
        """The service's PYTHONPATH, if it is to have one."""
        self.log = directory / f"{name}.log"
        own = {"operator_token": TOKEN, "state_dir": str(directory / name), "port": str(unused_port())}
        if name == "interception":
            own["ingress_port"] = str(unused_port())
        self._settings = {**own, **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.endpoints: dict[str, str] = {}

    def start(self) -> None:
        """Start it and wait for its line of readiness."""
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | {
            f"PENSTOCK_{self.name}_{key}".upper(): value for key, value in self._settings.items()
        }
        if self.path:
            environment["PYTHONPATH"] = self.path
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", self.module], env=environment, stdout=subprocess.PIPE, stderr=log
            )
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"{self.name} did not start: {self.log.read_text()[-4000:]}"
        ready = json.loads(line)
        self.address, self.endpoints = ready["address"], ready["endpoints"]

    @property
    def pid(self) -> int:
        """Of the present process, or of the last one."""
        assert self._process
        return self._process.pid

    def set(self, setting: str, value: str) -> None:
        """Changes a setting for the next start."""
        self._settings[setting] = value

    def move(self, directory: Path) -> None:
        """Takes its state elsewhere, after a kill: the next start has another address."""
        shutil.move(self._settings["state_dir"], directory)
        self._settings |= {"state_dir": str(directory), "port": str(unused_port())}

    def kill(self) -> None:
        """kill -9."""
        assert self._process
        self._process.kill()
        self._process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """SIGTERM, or another signal, and its exit status."""
        self.signal(number)
        assert self._process
        return self._process.wait(60)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to a process that runs."""
        assert self._process
        if self._process.poll() is None:
            self._process.send_signal(number)


class Stack:
    """Three services that know each other. `settings` are for each of them, `sandbox` for the sandbox service."""

    def __init__(
        self,
        directory: Path,
        tokenizers: Mapping[str, str],
        settings: Mapping[str, str] = MappingProxyType({}),
        sandbox: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.directory = directory
        self.interception = Process(
            "interception",
            directory,
            {"inference_address": "", "tokenizers": json.dumps(dict(tokenizers)), **settings},
        )
        self.interception.start()
        ingress = self.interception.endpoints["ingress"]
        self.sandbox = Process(
            "sandbox", directory, {"allowed_upstreams": json.dumps([ingress]), **settings, **sandbox}
        )
        self.sandbox.start()
        self.driver = Process(
            "driver",
            directory,
            {
                "sandbox_address": self.sandbox.address,
                "sandbox_token": TOKEN,
                "interception_address": self.interception.address,
                "interception_token": TOKEN,
                **settings,
            },
        )
        self.driver.start()

    @property
    def addresses(self) -> dict[str, str]:
        """Of the services, by name."""
        return {process.name: process.address for process in (self.driver, self.sandbox, self.interception)}

    def introduce(self, name: str, peer: Stack) -> None:
        """Starts each again, on its state and port, with a peer of its kind."""
        for process in (self.interception, self.sandbox, self.driver):
            process.stop()
            process.set("peers", json.dumps({name: peer.addresses[process.name]}))
            process.start()

    def stop(self) -> None:
        """All of them, in order."""
        for process in (self.driver, self.sandbox, self.interception):
            process.stop()


@contextmanager
def running(
    directory: Path,
    tokenizers: Mapping[str, str],
    settings: Mapping[str, str] = MappingProxyType({}),
    sandbox: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Stack]:
    """The stack, stopped at the end. For the settings see Stack."""
    stack = Stack(directory, tokenizers, settings, sandbox)
    try:
        yield stack
    finally:
        stack.stop()
