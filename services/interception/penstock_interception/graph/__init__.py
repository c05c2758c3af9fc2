"""The token graph of a rollout: every call's prompt, its sampled tokens, and the samples to train on.

A node holds only the tokens that its call added, each stored once; a call is a path. Sampled tokens are never tokenised
again: a repeated conversation is recognised by its messages, however a client re-serialised them, and its next prompt
starts with exactly the ids that the engine saw and sampled. A changed history opens a new, labelled branch.
"""

from penstock_interception.graph.record import GraphRecord
from penstock_interception.graph.token_graph import TokenGraph
from penstock_interception.graph.values import (
    Branch,
    CallClass,
    CallHints,
    CallNode,
    LogprobsMode,
    Plan,
    Sample,
    Sampled,
    SamplePolicy,
    TopLogprobs,
    TurnSpan,
    VersionSpan,
)

__all__ = [
    "Branch",
    "CallClass",
    "CallHints",
    "CallNode",
    "GraphRecord",
    "LogprobsMode",
    "Plan",
    "Sample",
    "SamplePolicy",
    "Sampled",
    "TokenGraph",
    "TopLogprobs",
    "TurnSpan",
    "VersionSpan",
]
