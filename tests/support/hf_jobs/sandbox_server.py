"""The routes of the sandbox server, dedicated mode, protocol 3: runs inside a job, with the standard library only.

Invariants: every route but /health needs the token, which no child process gets; a foreground command is told as lines
of JSON as it goes, with a ping in every silence; nothing but a request or a background process counts as activity.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hmac
import json
import os
import queue
import shutil
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler
from typing import Any

PIECE = 32 * 1024
BODY_LIMIT = 16 * 1024 * 1024
DRAIN_S = 2.0


class Sandbox:
    """What the whole server shares."""

    def __init__(self, token: str, ping_s: float) -> None:
        self.token = token
        self.ping_s = ping_s
        self.started = time.monotonic()
        self.active = time.monotonic()
        self.lock = threading.Lock()
        self.processes: dict[str, dict[str, Any]] = {}
        self.count = 0

    def busy(self) -> bool:
        """Whether a background process runs."""
        with self.lock:
            return any(entry["process"].poll() is None for entry in self.processes.values())


def spawn(body: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a command as the request's body says; raises ValueError."""
    command, shell = body.get("cmd"), body.get("shell")
    if isinstance(command, str) and shell is not False:
        argv = ["/bin/sh", "-c", command]
    elif isinstance(command, list) and command and shell is not True:
        argv = [str(one) for one in command]
    else:
        raise ValueError("cmd and shell do not fit")
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if "stdin" in body else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=body.get("cwd"),
            env={**os.environ, **body.get("env", {})},
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"failed to spawn {argv[0]!r}: {error}") from error


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what shares its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    sandbox: Sandbox

    def log_message(self, *_: object) -> None:
        """Nothing: what goes wrong shows in the answers."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        parts = urllib.parse.urlsplit(self.path)
        self.parameters = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if parts.path == "/health":
            self._answer(200, {"status": "ok", "protocol": 3})
            return
        if not hmac.compare_digest(self.headers.get("X-Sandbox-Token", ""), self.sandbox.token):
            self._answer(403, {"error": "invalid or missing X-Sandbox-Token"})
            return
        self.sandbox.active = time.monotonic()
        routes = {
            ("POST", "/v1/exec"): self._exec,
            ("POST", "/v1/processes"): self._start,
            ("GET", "/v1/processes"): self._list_processes,
            ("GET", "/v1/files/read"): self._read,
            ("PUT", "/v1/files/write"): self._write,
            ("GET", "/v1/files/list"): self._list,
            ("GET", "/v1/files/stat"): self._stat,
            ("DELETE", "/v1/files/delete"): self._delete,
            ("POST", "/v1/files/mkdir"): self._mkdir,
        }
        route = routes.get((method, parts.path))
        if route is None and method == "DELETE" and parts.path.startswith("/v1/processes/"):
            self._kill(parts.path.rpartition("/")[2])
            return
        if route is None:
            self._answer(404, {"error": f"no route: {method} {parts.path}"})
            return
        try:
            route()
        except FileNotFoundError as error:
            self._answer(404, {"error": str(error)})
        except (OSError, ValueError) as error:
            self._answer(400, {"error": str(error)})

    def _answer(self, status: int, content: object) -> None:
        self._answer_bytes(status, json.dumps(content).encode(), "application/json")

    def _answer_bytes(self, status: int, content: bytes, kind: str = "application/octet-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    # Commands ----------------------------------------------------------------------------------------------------

    def _asked(self) -> dict[str, Any]:
        if len(self.body) > BODY_LIMIT:
            raise ValueError("body too large")
        asked: dict[str, Any] = json.loads(self.body)
        return asked

    def _exec(self) -> None:
        asked = self._asked()
        began = time.monotonic()
        process = spawn(asked)
        events: queue.Queue[dict[str, Any]] = queue.Queue()
        readers = [
            threading.Thread(target=_read_all, args=(pipe, name, events), daemon=True)
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        if "stdin" in asked:
            threading.Thread(target=_feed, args=(process, asked["stdin"].encode()), daemon=True).start()
        threading.Thread(
            target=_wait, args=(process, began, asked.get("timeout"), readers, events), daemon=True
        ).start()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._chunk({"event": "start", "pid": process.pid})
            while True:
                try:
                    event = events.get(timeout=self.sandbox.ping_s)
                except queue.Empty:
                    event = {"event": "ping"}
                self._chunk(event)
                if event["event"] == "exit":
                    break
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            # The client went; the command runs on, with nobody to read it.
            self.close_connection = True

    def _chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _start(self) -> None:
        asked = self._asked()
        process = spawn(asked)
        for pipe in (process.stdout, process.stderr):
            threading.Thread(target=_read_all, args=(pipe, "", None), daemon=True).start()
        with self.sandbox.lock:
            name = f"p-{self.sandbox.count}"
            self.sandbox.count += 1
            self.sandbox.processes[name] = {"process": process, "cmd": asked["cmd"], "at": int(time.time() * 1000)}
        self._answer(200, {"id": name, "pid": process.pid, "cmd": asked["cmd"], "tag": None})

    def _list_processes(self) -> None:
        with self.sandbox.lock:
            found = [
                {
                    "id": name,
                    "pid": entry["process"].pid,
                    "cmd": entry["cmd"],
                    "tag": None,
                    "started_at_ms": entry["at"],
                    "running": entry["process"].poll() is None,
                    "exit_code": entry["process"].returncode,
                }
                for name, entry in self.sandbox.processes.items()
            ]
        self._answer(200, found)

    def _kill(self, name: str) -> None:
        with self.sandbox.lock:
            entry = self.sandbox.processes.pop(name, None)
        running = entry is not None and entry["process"].poll() is None
        if entry is not None and running:
            kill_group(entry["process"])
        self._answer(200, {"id": name, "ok": True, "killed": running})

    # Files -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with open(self.parameters["path"], "rb") as file:
            file.seek(int(self.parameters.get("offset", 0)))
            self._answer_bytes(200, file.read(int(self.parameters.get("length", -1))))

    def _write(self) -> None:
        path = self.parameters["path"]
        os.makedirs(os.path.dirname(path), exist_ok=True)
        offset = self.parameters.get("offset")
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset is None else 0)
        descriptor = os.open(path, flags, int(self.parameters.get("mode", "644"), 8))
        with os.fdopen(descriptor, "wb") as file:
            file.seek(int(offset or 0))
            file.write(self.body)
            if "truncate_to" in self.parameters:
                file.truncate(int(self.parameters["truncate_to"]))
        if "mode" in self.parameters:
            os.chmod(path, int(self.parameters["mode"], 8))
        self._answer(200, {"size": len(self.body)})

    def _entry(self, path: str) -> dict[str, Any]:
        found = os.lstat(path)
        kind = "dir" if stat.S_ISDIR(found.st_mode) else "symlink" if stat.S_ISLNK(found.st_mode) else "file"
        return {
            "name": os.path.basename(path),
            "path": path,
            "type": kind,
            "size": found.st_size,
            "mtime_ms": int(found.st_mtime * 1000),
            "mode": f"{stat.S_IMODE(found.st_mode):o}",
        }

    def _stat(self) -> None:
        self._answer(200, self._entry(self.parameters["path"]))

    def _list(self) -> None:
        folder = self.parameters["path"]
        self._answer(200, {"entries": [self._entry(os.path.join(folder, name)) for name in sorted(os.listdir(folder))]})

    def _delete(self) -> None:
        path = self.parameters["path"]
        if os.path.isdir(path) and not os.path.islink(path):
            if self.parameters.get("recursive") == "1":
                shutil.rmtree(path)
            else:
                os.rmdir(path)
        else:
            os.unlink(path)
        self._answer(200, {"ok": True})

    def _mkdir(self) -> None:
        os.makedirs(self.parameters["path"], exist_ok=True)
        self._answer(200, {"ok": True})


def _read_all(pipe: Any, name: str, events: queue.Queue[dict[str, Any]] | None) -> None:
    while data := os.read(pipe.fileno(), PIECE):
        if events is not None:
            events.put({"event": name, "data": data.decode(errors="replace")})
    pipe.close()


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(data)


def _wait(
    process: subprocess.Popen[bytes],
    began: float,
    timeout_s: float | None,
    readers: list[threading.Thread],
    events: queue.Queue[dict[str, Any]],
) -> None:
    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        kill_group(process)
        process.wait()
    until = time.monotonic() + DRAIN_S
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
    code = process.returncode
    events.put(
        {
            "event": "exit",
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "timed_out": timed_out,
            "duration_ms": int((time.monotonic() - began) * 1000),
        }
    )


def _watch_idle(sandbox: Sandbox, idle_s: float) -> None:
    while True:
        time.sleep(min(5.0, idle_s / 4))
        if time.monotonic() - sandbox.active > idle_s and not sandbox.busy():
            os._exit(0)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A thread for each connection, like the real one."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve until killed or idle."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--ping", type=float, default=15.0)
    options = parser.parse_args()
    # The environment came as one line on standard input: no secret stands in an argv.
    os.environ.update(json.loads(base64.b64decode(sys.stdin.readline())))
    Handler.sandbox = Sandbox(os.environ.pop("SBX_TOKEN"), options.ping)
    if idle := os.environ.get("SBX_IDLE_TIMEOUT"):
        threading.Thread(target=_watch_idle, args=(Handler.sandbox, float(idle)), daemon=True).start()
    Server(options.socket, Handler).serve_forever()


if __name__ == "__main__":
    main()
