"""What a fleet of 10,000 rollouts on 100 nodes needs, from the costs that were measured here.

The work is that of coding agents: 30 minutes, 40 model calls, 300 sampled tokens a call. Beside each figure that is
measured stands the one that the design was made for, and more than a quarter beyond it is a fault. What this command
cannot measure (GPUs, sandboxes with real agents, Envoy, pods) is taken from elsewhere, labelled, and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.report import Row, Section

ROLLOUTS: Final = 10_000
NODES: Final = 100
ROLLOUT_S: Final = 1_800.0
CALLS: Final = 40
SAMPLED: Final = 300
GPU_TOKENS_PER_S: Final = 2_500.0
"""Sampled tokens per second of one GPU: an assumption, with 2,000 to 3,000 of it."""
SANDBOX_MIB: Final = 2.2
AGENT_GB: Final = 0.4
"""Memory of a local sandbox at rest and of its agent: from `python -m benchmarks sandboxes`, and an assumption."""
QUEUED_KB: Final = 4.0
"""The most memory of the driver for a rollout that waits for a slot, as `python -m benchmarks fairness` judges it."""
COLD_CALL_MS: Final = 8.6
CALL_KIB: Final = 8.8
TOKEN_BYTES: Final = 44
"""Of a gate, for an agent-size prompt whose words it has not seen, and what it keeps: `python -m benchmarks gate`."""
BODIES_MB: Final = 5.0
TRAJECTORY_MB: Final = 1.0
ENVOY_MS: Final = 0.4
CLAIMS_PER_S: Final = 10.0
"""Of a rollout's request bodies and trajectory, of a call through Envoy, and how many pods a controller claims before
tuning: assumptions."""
DRIFT: Final = 0.25

_CHURN: Final = ROLLOUTS / ROLLOUT_S
_CALLS_PER_S: Final = _CHURN * CALLS
_OF_GATE: Final = "not measured here: `python -m benchmarks gate`"
_ASSUMED: Final = "not measured here, assumed"


@dataclass(frozen=True, slots=True)
class Costs:
    """What one rollout costs here: CPU in ms and memory in KB by service, and the gate's CPU in ms for one call,
    with the opening of a rollout."""

    cpu_ms: Mapping[str, float]
    waiting_kb: Mapping[str, float]
    call_ms: float


def table(costs: Costs) -> Section:
    """The table; the note of each judged row has the design's figure and the ratio to it."""
    judged = _judged(costs)
    rows = [
        Row("rollouts that start", _CHURN, "/s"),
        Row("model calls", _CALLS_PER_S, "/s"),
        *(need.row for need in judged),
        *_unjudged(costs),
    ]
    return Section(
        f"{ROLLOUTS:,} rollouts of 30 min and {CALLS} calls on {NODES} nodes, from the costs measured here",
        rows,
        faults=[fault for need in judged if (fault := need.fault)],
    )


@dataclass(frozen=True, slots=True)
class _Need:
    name: str
    value: float
    unit: str
    designed: float
    note: str = ""

    @property
    def row(self) -> Row:
        compared = f"designed {self.designed:g}, {self.value / self.designed:.2f} of it"
        return Row(self.name, self.value, self.unit, "; ".join(filter(None, [self.note, compared])))

    @property
    def fault(self) -> str:
        """What is wrong with it; empty if nothing is."""
        most = (1 + DRIFT) * self.designed
        if self.value <= most:
            return ""
        return (
            f"{self.name}: {self.value:.3g} {self.unit}, at most {most:.3g} (designed {self.designed:g}, and a quarter)"
        )


def _judged(costs: Costs) -> list[_Need]:
    driver, gate_kb, call_ms = costs.cpu_ms["driver"], costs.waiting_kb["interception"], costs.call_ms
    return [
        _Need("drivers, steady", _CHURN * driver / 1e3, "cores", 0.11, f"{driver:.1f} ms a rollout"),
        _Need("drivers, all at once", ROLLOUTS * driver / 1e3, "core s", 200),
        _Need("drivers, rollouts of 60 s", ROLLOUTS / 60 * driver / 1e3, "cores", 3.3),
        _Need(
            "gates, steady",
            _CALLS_PER_S * call_ms / 1e3,
            "cores",
            0.5,
            f"{call_ms:.1f} ms a call, with an opening",
        ),
        _Need("gates, first calls all at once", ROLLOUTS * call_ms / 1e3, "core s", 24, "small prompts"),
        _Need("gates, held streams", ROLLOUTS * gate_kb / 1e6, "GB", 0.34, f"{gate_kb:.0f} KB a rollout"),
    ]


def _unjudged(costs: Costs) -> list[Row]:
    sandbox, calls = costs.cpu_ms["sandbox"], ROLLOUTS * CALLS
    return [
        Row("drivers, memory of running rollouts", ROLLOUTS * costs.waiting_kb["driver"] / 1e6, "GB"),
        Row(
            "drivers, memory of as many queued",
            ROLLOUTS * QUEUED_KB / 1e6,
            "GB",
            f"not measured here: at most {QUEUED_KB:g} KB each by `python -m benchmarks fairness`",
        ),
        Row("sandbox services, a node, steady", _CHURN * sandbox / 1e3 / NODES, "cores", f"{sandbox:.1f} ms each"),
        Row("sandbox services, a node's part at once", ROLLOUTS / NODES * sandbox / 1e3, "core s", "no processes"),
        Row(
            "memory of a node",
            ROLLOUTS / NODES * (AGENT_GB + SANDBOX_MIB / 1e3),
            "GB",
            f"{_ASSUMED}: {AGENT_GB:g} GB an agent, {SANDBOX_MIB:g} MiB a sandbox; designed 30 to 50",
        ),
        Row(
            "GPUs for sampling",
            _CALLS_PER_S * SAMPLED / GPU_TOKENS_PER_S,
            "",
            f"{_ASSUMED}: {GPU_TOKENS_PER_S:g} tokens/s each; without prefill; designed 20 to 40",
        ),
        Row(
            "gates, first calls all at once, cold", ROLLOUTS * COLD_CALL_MS / 1e3, "core s", f"{_OF_GATE}; designed 86"
        ),
        Row("gates, kept of calls", calls * CALL_KIB * 1024 / 1e9, "GB", f"{_OF_GATE}; designed 3.4"),
        Row("gates, kept of sampled tokens", calls * SAMPLED * TOKEN_BYTES / 1e9, "GB", f"{_OF_GATE}; designed 5"),
        Row("gates, bodies on disk", _CHURN * BODIES_MB, "MB/s", f"{_ASSUMED}: {BODIES_MB:g} MB each; designed 28"),
        Row(
            "Envoy, steady", _CALLS_PER_S * ENVOY_MS / 1e3, "cores", f"{_ASSUMED}: {ENVOY_MS:g} ms a call; designed 0.1"
        ),
        Row("Envoy, first calls all at once", ROLLOUTS * ENVOY_MS / 1e3, "core s", f"{_ASSUMED}; designed 4"),
        Row("trajectories", _CHURN * TRAJECTORY_MB, "MB/s", f"{_ASSUMED}: {TRAJECTORY_MB:g} MB each; designed 6"),
        Row(
            "claims of pods, where each rollout has one",
            _CHURN,
            "/s",
            f"not measured here: a controller claims {CLAIMS_PER_S:g} a second and more; not the default",
        ),
    ]
