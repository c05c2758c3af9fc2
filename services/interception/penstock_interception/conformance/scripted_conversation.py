"""One rollout as its service sees it, with a model whose tokens are never the canonical ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock_codec import Codec
from penstock_codec.chat import FinishReason, Message, Tool
from penstock_interception.conformance.dialects import Dialect
from penstock_interception.conformance.sampled_text import Speech
from penstock_interception.graph import (
    CallHints,
    CallNode,
    LogprobsMode,
    Plan,
    Sampled,
    TokenGraph,
    VersionSpan,
)

BASH = Tool(
    "bash",
    "Run a command.",
    '{"type": "object", "properties": '
    '{"command": {"type": "string"}, "n": {"type": "number"}, "x": {"type": "array"}}}',
)


@dataclass
class ScriptedConversation:
    """A client that sends messages over its dialect, and an engine that samples given text, one byte per token."""

    codec: Codec
    dialect: Dialect
    graph: TokenGraph
    answered: int = 0
    plans: dict[str, Plan] = field(default_factory=dict)

    @classmethod
    def start(cls, codec: Codec, dialect: Dialect) -> ScriptedConversation:
        """Starts a rollout without calls."""
        return cls(codec, dialect, TokenGraph("rollout", codec))

    def call(
        self,
        messages: Sequence[Message],
        completion: str,
        *,
        tools: Sequence[Tool] = (BASH,),
        hints: CallHints | None = None,
        finish: FinishReason | None = None,
    ) -> CallNode:
        """Makes one call: sends the messages over the wire, then samples `completion`, one byte per token."""
        plan = self.graph.plan(self.dialect(messages), tools, hints)
        self.answered += 1
        return self.commit(f"call-{self.answered}", plan, completion, finish, tools=tools)

    def commit(
        self,
        call_id: str,
        plan: Plan,
        completion: str,
        finish: FinishReason | None = None,
        *,
        tools: Sequence[Tool] = (BASH,),
    ) -> CallNode:
        """Commits the answer to a planned call."""
        if self.codec.reasoning_open(plan.prompt_ids):  # the template opened the reasoning
            completion = Speech(self.codec).opened(self.codec.decode(plan.prompt_ids[-8:]), completion)
        ids = self.codec.bytewise(completion)
        parsed = self.codec.parse(ids, prompt_ids=plan.prompt_ids, tools=tools, finish_reason=finish)
        sampled = Sampled(
            message=parsed.message,
            finish_reason=parsed.finish_reason,
            token_ids=ids,
            logprobs=np.full(ids.size, -0.25, dtype=np.float32),
            logprobs_mode=LogprobsMode.PROCESSED,
            versions=(VersionSpan(self.answered, 0, int(ids.size)),),
        )
        self.plans[call_id] = plan
        self.graph.commit(call_id, plan, sampled)
        return self.graph.calls[call_id]

    def prompt(self, node: CallNode) -> list[int]:
        """Returns the prompt ids that the engine was given for a call."""
        ids: list[int] = self.plans[node.call_id].prompt_ids.tolist()
        return ids

    def seen(self, node: CallNode) -> list[int]:
        """Returns a call's prompt and completion, as the engine saw and sampled them."""
        ids = node.sampled.token_ids
        if ids is None:
            raise ValueError("every answer here has tokens")
        return [*self.prompt(node), *ids.tolist()]

    def continues(self, later: CallNode, earlier: CallNode) -> bool:
        """Returns whether the later prompt starts with exactly the earlier prompt and completion."""
        seen = self.seen(earlier)
        return self.prompt(later)[: len(seen)] == seen
