"""Starts of services and commands as forks of a process that has imported them already.

A start of a service takes 0.6 to 1 s of a processor, nearly all of it imports, and the suite has hundreds. `installed`
makes every `subprocess.Popen` of this process (asyncio's as well) that runs `sys.executable -m` one of `MODULES` a fork
of a warm process: one for each module, started at its first use, which has imported what the module needs and has no
thread, no event loop and nothing of gRPC's. It is itself a fork of one that has imported what most modules need. What
comes of it is what `Popen` gives: a child of this process with its own pid, argv, environment, streams, directory and
process group, which dies, is waited for and ends with its parent as any other. It runs the module from its beginning,
as `python -m` does. Two things differ: /proc/PID/environ shows the environment of the warm process, and
/proc/PID/cmdline ends with more than one zero byte.

So is a start on a host of `tests.hosts.network`, which has setpriv and nsenter in front: the fork enters the network
namespace, and dies with its parent, as those would let it.

The fork is `clone(2)` with CLONE_PARENT, since only a parent can wait for its child. Where the kernel or processor is
not known, or a start asks for something that a fork cannot have, it is an ordinary start; so is every start inside
`genuine`, for tests of the start itself.

Run as a process: `python -m tests.support.services.forking SOCKET`.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

_INFERENCE: Final = (
    "penstock_inference.app",
    "penstock_inference.engines.numpy",
    "penstock_inference.engines.scripted",
)
MODULES: Final[Mapping[str, Sequence[str]]] = {
    "penstock_driver": ("penstock_driver.app",),
    "penstock_interception": ("penstock_interception.app",),
    # With what it imports where there is a Docker daemon, or E2B or Kubernetes is chosen. Hugging Face's SDKs read the
    # environment, what they are built upon does not.
    "penstock_sandbox": (
        "penstock_sandbox.app",
        "penstock_sandbox.backends.docker",
        "penstock_sandbox.backends.docker.engine.streams",
        "penstock_sandbox.backends.e2b",
        "penstock_sandbox.backends.hf.backend",
        "penstock_sandbox.backends.kubernetes",
        "docker",
        "e2b",
        "kubernetes_asyncio.client",
        "kubernetes_asyncio.config",
        "kubernetes_asyncio.watch",
        "cryptography.x509",
        "httpcore2",
        "httpx2",
        "anyio._backends._asyncio",
        "filelock",
        "yaml",
    ),
    "penstock_inference": _INFERENCE,
    "penstock_inference.replicas.child": _INFERENCE,
    "penstock.cli.main": ("penstock.cli.main",),
    # It forks services itself, one after another of one kind.
    "tests.support.services.dying": (
        "penstock_driver.app",
        "penstock_interception.app",
        "penstock_sandbox.app",
        "aiohttp",
    ),
    # Without the policy, whose tokenizer has threads.
    "tests.support.services.trainer": ("penstock.client", "penstock_codec.codec", "penstock_codec.tiny_tokenizer"),
    # Stand-ins, of which most tests of a backend have one of their own.
    "tests.support.agent_sandbox": (
        "tests.support.agent_sandbox.api",
        "tests.support.agent_sandbox.controller",
        "penstock_sandbox.backends.kubernetes.manifests",
    ),
    "tests.support.e2b_cloud": ("tests.support.e2b_cloud.cloud", "tests.support.e2b_cloud.envd"),
    "tests.support.hf_jobs.jobs": ("aiohttp.web", "tests.support.hf_jobs.machine", "trustme"),
}
"""What can be started so, and what its warm process imports."""
_COMMON: Final = ("penstock_chassis.server", "aiohttp", "grpc.aio", "numpy", "pydantic_settings")
"""What most of them import."""
_ANEW: Final = "penstock.cli"
"""What a fork imports again: its console asks the environment for its width and colours."""
_READ_BY_E2B: Final = (
    "E2B_CONNECTION_RETRIES",
    "E2B_KEEPALIVE_EXPIRY",
    "E2B_MAX_CONNECTIONS",
    "E2B_MAX_KEEPALIVE_CONNECTIONS",
)
"""The variables that E2B's SDK reads when it is imported; the others it reads at each use."""

_CLONE_PARENT: Final = 0x8000
_CLONE_CHILD_CLEARTID: Final = 0x200000
_CLONE_CHILD_SETTID: Final = 0x1000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_PDEATHSIG: Final = 1
_PR_GET_TID_ADDRESS: Final = 40
# The system call's number, and its arguments after flags and stack: two kernels' orders of (ptid, ctid, tls).
_CLONE: Final[Mapping[str, tuple[int, bool]]] = {"x86_64": (56, True), "aarch64": (220, False)}
ON_A_HOST: Final = ("setpriv", "--pdeathsig", "KILL", "nsenter")
"""What starts a program in a network namespace, whose path and `--` follow, so that it dies with its parent."""
_NETWORK: Final = "--net="
_LARGEST: Final = 1 << 20
_ARGV_ROOM: Final = "-" * 1024
_genuine = 0


class Warm:
    """A warm process, seen from the process that asks it for forks."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        self._lock = threading.Lock()
        self._pid, self._socket = pid, orders

    @classmethod
    def start(cls) -> Warm:
        """One that has imported what most modules need, for `warm`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), _ARGV_ROOM],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[3],
                # A BLAS with threads would be forked without them.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        process.returncode = 0  # `close` waits for it, as for those that are forks
        return cls(process.pid, ours)

    def warm(self, module: str) -> Warm:
        """One that has imported what a module needs, too."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return Warm(self.fork({"warm": module}, [theirs.fileno()]), ours)

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of a new child of this process, whose descriptors are these from 0 on."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError(f"the warm process ended with {os.waitpid(self._pid, 0)[1]}")
        return int(answer)

    def close(self) -> None:
        """Ends it; its forks go on."""
        self._socket.close()
        os.waitpid(self._pid, 0)


@contextmanager
def installed() -> Iterator[None]:
    """Forks for every start of MODULES by this process."""
    if sys.platform != "linux" or platform.machine() not in _CLONE:
        yield
        return
    execute, warm, first = vars(subprocess.Popen)["_execute_child"], dict[str, Warm](), list[Warm]()
    given = inspect.signature(execute)

    def start(self: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        named = given.bind(self, *args, **options).arguments
        order = _order(named)
        # A child may ask to end with the thread that started it, which here is the one that started the warm process.
        if order is None or (order["module"] not in warm and threading.current_thread() is not threading.main_thread()):
            execute(self, *args, **options)
            return
        module = order["module"]
        if not first:
            first.append(Warm.start())
        if module not in warm:
            warm[module] = first[0].warm(module)
        streams = [named[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        passed = sorted(named["pass_fds"])
        order["numbers"] = [0, 1, 2, *passed]
        descriptors = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        try:
            self.pid = warm[module].fork(order, [*descriptors, *passed])
            self._child_created = True  # type: ignore[attr-defined]
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(named[name] for name in ends))  # type: ignore[attr-defined]

    setattr(subprocess.Popen, "_execute_child", start)  # noqa: B010 - it is typed as no attribute
    try:
        yield
    finally:
        setattr(subprocess.Popen, "_execute_child", execute)  # noqa: B010
        for process in (*warm.values(), *first):
            process.close()


@contextmanager
def genuine() -> Iterator[None]:
    """Every start is an ordinary one: for tests of the start itself."""
    global _genuine
    _genuine += 1
    try:
        yield
    finally:
        _genuine -= 1


def _order(named: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a fork is to be, from the arguments of `Popen._execute_child`; None where it must be an ordinary start."""
    args, environment = named["args"], named["env"]
    environment = dict(os.environ if environment is None else environment)
    if _genuine or isinstance(args, str | bytes | os.PathLike) or named["preexec_fn"] is not None:
        return None
    argv = [os.fsdecode(item) for item in args]
    network = ""
    if tuple(argv[:4]) == ON_A_HOST and len(argv) > 6 and argv[4].startswith(_NETWORK) and argv[5] == "--":
        network, argv = argv[4].removeprefix(_NETWORK), argv[6:]
    if argv[:2] != [sys.executable, "-m"] or len(argv) < 3 or argv[2] not in MODULES:
        return None
    owner = (named["gid"], named["gids"], named["uid"], named["umask"])
    if owner != (None, None, None, -1) or not named["close_fds"] or named["shell"]:
        return None
    if _read_at_start(environment) != _read_at_start(os.environ):
        return None
    directory = os.fsdecode(named["cwd"] or Path.cwd())
    if not Path(directory).is_dir():
        return None
    return {
        "module": argv[2],
        "argv": argv,
        "network": network,
        "environment": {os.fsdecode(key): os.fsdecode(value) for key, value in environment.items()},
        "directory": directory,
        "session": named["start_new_session"],
        "group": named["process_group"],
    }


def _read_at_start(environment: Mapping[Any, Any]) -> dict[str, str]:
    """The variables that an interpreter or an import reads when it starts, which a fork does not."""
    ours = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
    named = {os.fsdecode(key): os.fsdecode(value) for key, value in environment.items()}
    return {
        key: value
        for key, value in named.items()
        if (key.startswith("PYTHON") and key not in ours) or key in _READ_BY_E2B
    }


# In the warm process ------------------------------------------------------------------------------------------------


def _serve(modules: Sequence[str], orders: socket.socket) -> Mapping[str, Any] | None:
    """Imports these and takes orders until there are no more; in a fork it returns the order."""
    for name in modules:
        importlib.import_module(name)
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{_ANEW}.")]:
        del sys.modules[name]
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    clone = _cloning()
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, _LARGEST, 253)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        pid = clone()
        if pid == 0 and "warm" in order:
            orders.close()
            with socket.socket(fileno=descriptors[0]) as own:
                return _serve(MODULES[order["warm"]], own)
        if pid == 0:
            _become(order, descriptors, orders)
            return order
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _cloning() -> Any:
    """A function that forks, as os.fork, a child of this process's parent."""
    number, tls_last = _CLONE[platform.machine()]
    api = ctypes.pythonapi  # it keeps the interpreter's lock during calls, unlike CDLL
    # The C library keeps the thread's id where it asked the kernel, at the process's start, to clear it.
    place = ctypes.c_void_p()
    if api.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) != 0:
        raise OSError("this kernel does not say where the C library keeps the thread's id")
    word = ctypes.c_long
    flags = word(_CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD)
    last = (place, word(0)) if tls_last else (word(0), place)

    def clone() -> int:
        api.PyOS_BeforeFork()
        pid: int = api.syscall(word(number), flags, word(0), word(0), *last)
        if pid == 0:
            api.PyOS_AfterFork_Child()
        else:
            api.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError("clone failed")
        return pid

    return clone


def _become(order: Mapping[str, Any], descriptors: Sequence[int], orders: socket.socket) -> None:
    """In the fork: what the start of a process gives it."""
    orders.close()
    # Above all numbers that they are to have, so that none is overwritten before it is copied.
    above = max(order["numbers"]) + 1
    copies = [_copied_above(descriptor, above) for descriptor in descriptors]
    for number, copy in zip(order["numbers"], copies, strict=True):
        os.dup2(copy, number)
    for descriptor in {*descriptors, *copies} - set(order["numbers"]):
        os.close(descriptor)
    if order["network"]:
        _enter(order["network"])
    if order["session"]:
        os.setsid()
    if order["group"] is not None and order["group"] >= 0:
        os.setpgid(0, order["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _show(order["argv"])
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:] = [order["directory"], *further, *sys.path[1:]]
    sys.argv = order["argv"][2:]
    _open_streams()
    if any(Path(path, "sitecustomize.py").is_file() for path in further):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _enter(network: str) -> None:
    """Moves this process, which has one thread, into a network namespace; it dies with the thread of its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"{network} cannot be entered")
    os.close(descriptor)


def _copied_above(descriptor: int, least: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)


def _show(argv: Sequence[str]) -> None:
    """In /proc/PID/cmdline, which is the memory that the kernel put the process's own arguments into."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(item) for item in argv) + b"\0"
    with suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(text[: end - begin - 1].ljust(end - begin, b"\0"))


def _open_streams() -> None:
    """As at an interpreter's start: how they buffer depends on what they are now."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    encoding = sys.stdout.encoding
    streams: dict[str, TextIO] = {
        "stdin": io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding=encoding)
    }
    for number, name, errors in ((1, "stdout", sys.stdout.errors), (2, "stderr", "backslashreplace")):
        lines = not unbuffered and (number == 2 or os.isatty(number))
        raw = io.FileIO(number, "w", closefd=False)
        binary: Any = raw if unbuffered else io.BufferedWriter(raw)
        streams[name] = io.TextIOWrapper(
            binary, encoding=encoding, errors=errors, line_buffering=lines, write_through=unbuffered
        )
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at a terminal is for the tests, which end this process
    with socket.socket(fileno=int(sys.argv[1])) as _orders:
        _chosen = _serve(_COMMON, _orders)
    if _chosen is not None:
        runpy.run_module(_chosen["module"], run_name="__main__", alter_sys=True)
