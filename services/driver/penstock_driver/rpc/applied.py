"""A rollout's spec as it is kept and shown: with defaults filled in, and without an upstream's key, a secret
environment's values and files' contents."""

from __future__ import annotations

from penstock.driver.v1 import rollout_pb2
from penstock_chassis import times
from penstock_driver.rollouts import RolloutOrder, Task


def as_applied(spec: rollout_pb2.RolloutSpec, order: RolloutOrder) -> rollout_pb2.RolloutSpec:
    """The spec to keep and to show."""
    shown = rollout_pb2.RolloutSpec()
    shown.CopyFrom(spec)
    shown.agent.spec_sha256 = order.agent.sha256
    for option in order.agent.spec.options:
        if option.default is not None and option.name not in shown.agent.options:
            shown.agent.options[option.name] = option.default
    if shown.source.upstream.HasField("caller"):
        shown.source.upstream.caller.api_key = ""
    for server in shown.agent.mcp_servers:
        for name in list(server.stdio.secret_env) if server.HasField("stdio") else ():
            server.stdio.secret_env[name] = ""
    without_contents(shown.task)
    for name in ("prepare", "setup", "agent", "verify"):
        getattr(shown.limits, name).CopyFrom(times.duration(getattr(order.limits, f"{name}_s")))
    fill_verifier(shown.task, order.task)
    return shown


def without_contents(task: rollout_pb2.Task) -> None:
    """Take the contents of files and the values of secrets out of a task that is kept and shown."""
    for file in [*task.files, *task.verifier.files]:
        file.content = b""
    for command in [*task.setup, *task.verifier.commands]:
        for name in list(command.secret_env):
            command.secret_env[name] = ""


def fill_verifier(shown: rollout_pb2.Task, task: Task) -> None:
    """Fill in what the verifier leaves to the driver."""
    if task.verifier:
        shown.verifier.range_min, shown.verifier.range_max = task.verifier.range_min, task.verifier.range_max
        shown.verifier.command_timeout.CopyFrom(times.duration(task.verifier.command_timeout_s))
        shown.verifier.fresh_fork = bool(task.verifier.fresh_fork)
