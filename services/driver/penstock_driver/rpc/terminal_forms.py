"""Terminal episodes in the wire's form, both ways: what is kept of them, and what clients see."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock.sandbox.v1 import process_service_pb2
from penstock_chassis import times
from penstock_driver.rollouts import CommandFinished, Outcome
from penstock_driver.rpc.applied import fill_verifier, without_contents
from penstock_driver.rpc.orders import command_of_step, terminal_from_proto
from penstock_driver.rpc.shown import command_finished, outcome_to_proto
from penstock_driver.rpc.values import exit_to_proto
from penstock_driver.terminals.episodes import Action, Answer, Observation, TerminalOrder
from penstock_driver.terminals.records import TerminalRecord


class TerminalForms:
    """`episodes.Forms` as protos."""

    def order(self, data: bytes) -> TerminalOrder:
        """See episodes.Forms."""
        return terminal_from_proto(terminal_service_pb2.OpenTerminalRequest.FromString(data))

    def action(self, data: bytes) -> Action:
        """See episodes.Forms."""
        return action_from_proto(terminal_service_pb2.StepRequest.FromString(data))

    def observation(self, step_id: str, observation: Observation) -> bytes:
        """See episodes.Forms."""
        wire = terminal_service_pb2.StepResponse(step_id=step_id, ended=observation.ended)
        if observation.result is not None:
            result = observation.result
            wire.result.CopyFrom(
                process_service_pb2.RunResult(
                    exit=exit_to_proto(result.exit), stdout=result.stdout, stderr=result.stderr
                )
            )
        ended = outcome_to_proto(Outcome(observation.failure, observation.reward))
        if ended.HasField("reward"):
            wire.reward.CopyFrom(ended.reward)
        if ended.HasField("failure"):
            wire.failure.CopyFrom(ended.failure)
        return wire.SerializeToString()

    def outcome(self, outcome: Outcome) -> bytes:
        """See episodes.Forms."""
        return outcome_to_proto(outcome).SerializeToString()

    def commands(self, commands: Sequence[CommandFinished]) -> bytes:
        """See episodes.Forms; as a Terminal that has nothing else, to be merged into the right field."""
        wire = terminal_service_pb2.Terminal(verifier_commands=[command_finished(command) for command in commands])
        return wire.SerializeToString()


def action_from_proto(request: terminal_service_pb2.StepRequest) -> Action:
    """A step's action, which is set."""
    if request.WhichOneof("action") == "final_answer":
        return Answer(request.final_answer)
    return command_of_step(request.command)


def kept_order(request: terminal_service_pb2.OpenTerminalRequest) -> bytes | None:
    """What an open episode is taken up again with; None where that would put a secret on disk."""
    commands = [*request.task.setup, *request.task.verifier.commands]
    if any(command.secret_env for command in commands):
        return None
    kept = terminal_service_pb2.OpenTerminalRequest()
    kept.CopyFrom(request)
    kept.task.ClearField("files")  # they are in the sandbox
    return kept.SerializeToString()


def shown_terminal(request: terminal_service_pb2.OpenTerminalRequest, order: TerminalOrder) -> bytes:
    """What is shown of an episode's order, as a Terminal."""
    wire = terminal_service_pb2.Terminal(task=request.task, labels=request.labels)
    without_contents(wire.task)
    fill_verifier(wire.task, order.task)
    return wire.SerializeToString()


def terminal_to_proto(record: TerminalRecord) -> terminal_service_pb2.Terminal:
    """An episode as it stands."""
    wire = terminal_service_pb2.Terminal.FromString(record.shown)
    wire.terminal_id = record.terminal_id
    wire.step_count = record.step_count
    wire.create_time.CopyFrom(times.timestamp(record.create_time))
    wire.setup_commands.extend(terminal_service_pb2.Terminal.FromString(record.setup).verifier_commands)
    wire.verifier_commands.extend(terminal_service_pb2.Terminal.FromString(record.verification).verifier_commands)
    if record.deadline is not None:
        wire.expire_time.CopyFrom(times.timestamp(record.deadline))
    if record.end_time is not None:
        wire.end_time.CopyFrom(times.timestamp(record.end_time))
    if record.place is not None and not record.released:
        wire.sandbox_id = record.place.sandbox_id
    if record.outcome is None:
        return wire
    wire.ended = True
    outcome = rollout_pb2.Outcome.FromString(record.outcome)
    if outcome.HasField("reward"):
        wire.reward.CopyFrom(outcome.reward)
    if outcome.HasField("failure"):
        wire.failure.CopyFrom(outcome.failure)
    return wire
