"""What a fleet of 10,000 rollouts on 100 nodes needs, from the costs that were measured here.

The work is that of coding agents: 30 minutes, 40 model calls, 300 sampled tokens a call. What this machine cannot
measure (GPUs, sandboxes with real agents) is taken from elsewhere, and said. Beside each figure stands the one that the
design was made for: more than a quarter beyond it needs a reason.
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
QUEUED_KB: Final = 4.2
"""Memory of the driver for a rollout that waits for a slot, in a group."""
DRIFT: Final = 0.25

_CHURN: Final = ROLLOUTS / ROLLOUT_S
_CALLS_PER_S: Final = _CHURN * CALLS


@dataclass(frozen=True, slots=True)
class Costs:
    """What one rollout costs here: CPU in ms and memory in KB by service, and the gate's CPU in ms for one call,
    with the opening of a rollout."""

    cpu_ms: Mapping[str, float]
    waiting_kb: Mapping[str, float]
    call_ms: float


def table(costs: Costs) -> Section:
    """The table; the note of each row has the design's figure and the ratio to it."""
    driver, sandbox = costs.cpu_ms["driver"], costs.cpu_ms["sandbox"]
    gate_kb = costs.waiting_kb["interception"]
    return Section(
        f"{ROLLOUTS:,} rollouts of 30 min and {CALLS} calls on {NODES} nodes, from the costs measured here",
        [
            Row("rollouts that start", _CHURN, "/s"),
            Row("model calls", _CALLS_PER_S, "/s"),
            Row(
                "GPUs for sampling",
                _CALLS_PER_S * SAMPLED / GPU_TOKENS_PER_S,
                "",
                f"assumed: {GPU_TOKENS_PER_S:g} tokens/s each; without prefill",
            ),
            _row("drivers, steady", _CHURN * driver / 1e3, "cores", 0.11, f"{driver:.1f} ms a rollout"),
            _row("drivers, all at once", ROLLOUTS * driver / 1e3, "core s", 200, ""),
            _row("drivers, rollouts of 60 s", ROLLOUTS / 60 * driver / 1e3, "cores", 3.3, ""),
            _row(
                "gates, steady",
                _CALLS_PER_S * costs.call_ms / 1e3,
                "cores",
                0.5,
                f"{costs.call_ms:.1f} ms a call, with an opening",
            ),
            _row("gates, first calls all at once", ROLLOUTS * costs.call_ms / 1e3, "core s", 24, "small prompts"),
            _row("gates, held streams", ROLLOUTS * gate_kb / 1e6, "GB", 0.34, f"{gate_kb:.0f} KB a rollout"),
            Row("drivers, memory of running rollouts", ROLLOUTS * costs.waiting_kb["driver"] / 1e6, "GB"),
            Row("drivers, memory of as many queued", ROLLOUTS * QUEUED_KB / 1e6, "GB", "decision 039"),
            Row("sandbox services, a node, steady", _CHURN * sandbox / 1e3 / NODES, "cores", f"{sandbox:.1f} ms each"),
            Row("sandbox services, a node's part at once", ROLLOUTS / NODES * sandbox / 1e3, "core s", "no processes"),
            Row(
                "memory of a node",
                ROLLOUTS / NODES * (AGENT_GB + SANDBOX_MIB / 1e3),
                "GB",
                f"assumed: {AGENT_GB:g} GB an agent, {SANDBOX_MIB:g} MiB a sandbox",
            ),
        ],
    )


def _row(name: str, value: float, unit: str, designed: float, note: str) -> Row:
    ratio = value / designed
    beyond = " (beyond a quarter: say why)" if ratio > 1 + DRIFT else ""
    return Row(name, value, unit, "; ".join(filter(None, [note, f"designed {designed:g}, {ratio:.2f} of it{beyond}"])))
