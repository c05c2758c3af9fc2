"""Classifies calls: a first guess when a line opens, and the final class once its neighbours are known.

A class given by the ingress (from an agent's header or a spec's hint) is final. The others follow from the graph's
shape:

- the first line that has tools is MAIN; lines without tools that opened beside it and were not continued are TITLE;
- the same messages again after the same call are a RETRY: of several answers, the one that the agent continued keeps
  its line's class;
- a line that leaves another one in the middle is an EDIT;
- a new root with tools in another session of the agent is a SUB_AGENT;
- a new root that starts like a known line (same system prompt and first user message) or contains one of its replies
  is a COMPACTION if it has fewer messages, else an EDIT; the history of a line that has tools, without them, is a
  COMPACTION (the agent asks for a summary);
- a root with the main line's system prompt and tools but another task is a COMPACTION, unless the main line waits
  for a tool or the agent names another session: then it is a SUB_AGENT;
- any other root is a SUB_AGENT if it has tools or was continued, else a TITLE; one token at most is a PROBE.

TITLE, PROBE and RETRY are not trained, so a root gets one of these classes only if its answer was not continued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_interception.graph.fingerprint import digest
from penstock_interception.graph.values import CallClass, CallHints, CallNode, PromptKey

_MAIN_LINES = frozenset({CallClass.MAIN, CallClass.COMPACTION, CallClass.EDIT, CallClass.RETRY})


class Lines:
    """The facts about a graph's lines that classifying a new root needs."""

    def __init__(self) -> None:
        self._main: CallNode | None = None  # the last call of the main line
        self._longest: dict[tuple[bytes, bytes], int] = {}  # (system, first user) -> highest message count
        self._bare: set[bytes] = set()  # prompts of calls with tools, fingerprinted without the tools
        self._replies: dict[bytes, CallNode] = {}  # by the key of a reply with visible content

    def add(self, node: CallNode, reply: bytes | None) -> None:
        """Records a committed call; `reply` is the key of its answer, None if the answer has no visible content."""
        start = (node.key.system, node.key.first_user)
        self._longest[start] = max(self._longest.get(start, 0), node.key.messages)
        if node.key.has_tools:
            self._bare.add(node.key.bare)
        if reply is not None:
            self._replies[reply] = node
        main = self._main
        side = main is not None and main.key.has_tools and not node.key.has_tools  # a title requested at the same time
        if node.planned_class in _MAIN_LINES and not side:
            self._main = node

    def classify_root(self, key: PromptKey, keys: Sequence[bytes], hints: CallHints) -> tuple[CallClass, str]:
        """Returns the class of a line without a parent, and the reason; `keys` are its messages' keys."""
        if hints.call_class is not None:
            return hints.call_class, "the agent says so"
        if hints.max_tokens is not None and hints.max_tokens <= 1:
            return CallClass.PROBE, "one token is requested"
        main = self._main
        if main is None or (key.has_tools and not main.key.has_tools and main.parent is None):
            return CallClass.MAIN, ""
        if not key.has_tools and any(digest(*keys[:n]) in self._bare for n in range(2, len(keys))):
            return CallClass.COMPACTION, "the history again, without its tools"
        elsewhere = bool(hints.session) and bool(main.session) and hints.session != main.session
        if elsewhere and key.has_tools:
            return CallClass.SUB_AGENT, "another session of the agent"
        known = self._longest.get((key.system, key.first_user))
        if known is not None:
            if key.messages < known:
                return CallClass.COMPACTION, "the same task with a shortened history"
            return CallClass.EDIT, "the same task with an edited history"
        carried = next((found for item in reversed(keys) if (found := self._replies.get(item)) is not None), None)
        if carried is not None:
            return _rewritten(key, carried.key)
        if key.system == main.key.system and key.tools == main.key.tools:
            if elsewhere or main.sampled.message.tool_calls:
                return CallClass.SUB_AGENT, "another task while the main conversation waits"
            return CallClass.COMPACTION, "the main conversation starts again"
        return (CallClass.SUB_AGENT if key.has_tools else CallClass.TITLE), "another system prompt or other tools"


def _rewritten(key: PromptKey, line: PromptKey) -> tuple[CallClass, str]:
    """Returns the class of a root that contains a reply to the prompt `line`, and how the line's history differs."""
    if line.has_tools and not key.has_tools:
        return CallClass.COMPACTION, "the history again, without its tools"
    if key.messages <= line.messages:
        return CallClass.COMPACTION, "a known conversation with a shortened history"
    if key.system != line.system:
        return CallClass.EDIT, "a known conversation with another system prompt"
    if key.first_user != line.first_user:
        return CallClass.EDIT, "a known conversation with another first message"
    return CallClass.EDIT, "a known conversation with an edited history"


def settle(nodes: Sequence[CallNode], is_written: Callable[[CallNode], bool]) -> dict[str, CallClass]:
    """Returns each call's final class, given all calls; `nodes` in commit order.

    `is_written`: whether somebody wrote a call's answer, without tokens, so that the line goes on beside it.
    """
    continued = {node.parent.call_id for node in nodes if node.parent is not None and node.continues_parent}
    winners: dict[tuple[bytes, bytes, str], CallNode] = {}
    for node in nodes:
        twin = _place(node)
        best = winners.get(twin)
        if best is None or node.call_id in continued or best.call_id not in continued:
            winners[twin] = node
    tools_seen = any(
        node.planned_class is CallClass.MAIN and not node.continues_parent and node.key.has_tools for node in nodes
    )
    settled: dict[str, CallClass] = {}
    lines: dict[str, bytes] = {}  # call -> prompt state that continues its line; others leave it
    first: dict[tuple[bytes, bytes, str], CallNode] = {}
    for node in nodes:
        twin = _place(node)
        original = first.setdefault(twin, node)
        if node.hinted:
            settled[node.call_id] = node.planned_class
            continue
        if winners[twin] is not node:
            settled[node.call_id] = CallClass.RETRY if node.call_id not in continued else CallClass.EDIT
            continue
        parent = node.parent
        if parent is not None and node.continues_parent:
            stays = is_written(node) or lines.setdefault(parent.call_id, node.key.state) == node.key.state
            above = settled[parent.call_id]
            inherited = CallClass.EDIT if above is CallClass.RETRY else above
            settled[node.call_id] = inherited if stays else CallClass.EDIT
            continue
        root = original.planned_class
        if root is CallClass.MAIN and tools_seen and not node.key.has_tools:
            root = CallClass.TITLE
        if root is CallClass.TITLE and node.call_id in continued:
            root = CallClass.SUB_AGENT
        settled[node.call_id] = root
    return settled


def _place(node: CallNode) -> tuple[bytes, bytes, str]:
    """Returns what is the same for calls with the same prompt: answers that look alike may have different tokens."""
    parent = node.parent.call_id if node.parent is not None and node.continues_parent else ""
    return node.key.state, node.key.kwargs, parent
