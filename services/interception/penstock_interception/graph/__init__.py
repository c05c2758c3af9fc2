"""The token graph of a rollout: what every call's prompt was, what was sampled, and what to train on.

Nodes hold only the tokens that a call added, each stored once; a call is a path. What was sampled is never tokenised
again: a conversation that comes back is recognised by its messages, however a client re-serialised them, and its next
prompt starts with exactly the ids that the engine saw and sampled. Where history really changed, a new branch opens and
is labelled.
"""

from penstock_interception.graph.core import TokenGraph
from penstock_interception.graph.model import (
    Branch,
    CallClass,
    CallHints,
    CallNode,
    LogprobsMode,
    Plan,
    Sample,
    Sampled,
    SamplePolicy,
    TurnSpan,
    VersionSpan,
)
from penstock_interception.graph.record import CommitRecord

__all__ = [
    "Branch",
    "CallClass",
    "CallHints",
    "CallNode",
    "CommitRecord",
    "LogprobsMode",
    "Plan",
    "Sample",
    "SamplePolicy",
    "Sampled",
    "TokenGraph",
    "TurnSpan",
    "VersionSpan",
]
