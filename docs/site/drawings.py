"""The pictures of the first pages and of the concepts, which stand in docs/images: `python -m docs.site.drawings`."""

from collections.abc import Callable, Mapping
from typing import Final

from docs.site.descriptors import ROOT
from docs.site.pictures import Picture

IMAGES: Final = ROOT / "docs" / "images"


def overview() -> Picture:
    """What is where: agents in sandboxes, the gate between them and the trainer, what comes out."""
    made = Picture(
        620,
        330,
        "An unmodified agent works in a sandbox. Its model calls stop at the gate, where your trainer or engine answers"
        " them with token ids and logprobs. A verifier grades what the agent left. The trajectory goes to the trainer.",
    )
    for shift in (12, 6, 0):
        made.box(10 + shift, 44 + shift, 196, 250, kind="" if shift == 0 else "frame")
    made.text(108, 30, "sandboxes, as many as you want", "small")
    made.box(30, 64, 156, 56, "agent", small="any, unmodified", kind="agent")
    made.box(30, 138, 156, 48, "your repository")
    made.box(30, 224, 156, 56, "verifier", small="after the agent is dead")
    made.box(310, 64, 80, 56, "gate", kind="gate")
    made.box(476, 44, 134, 96, "your trainer", small="and its engine", kind="policy")
    made.arrow((186, 80), (310, 80))
    made.text(266, 74, "model call", "small")
    made.arrow((310, 106), (186, 106))
    made.text(266, 122, "answer", "small")
    made.arrow((390, 80), (476, 80), text="prompt ids")
    made.arrow((476, 106), (390, 106), text="ids, logprobs", below=True)
    made.arrow((108, 138), (108, 120))
    made.arrow((108, 186), (108, 224))
    made.box(
        296,
        218,
        314,
        68,
        "trajectory",
        small="token ids · mask · logprobs · versions · reward",
        kind="policy",
    )
    made.arrow((350, 120), (350, 218))
    made.text(358, 174, "every call", "small left")
    made.arrow((186, 252), (296, 252))
    made.text(260, 246, "reward", "small")
    made.arrow((543, 218), (543, 140))
    made.text(551, 184, "learn", "small left")
    return made


def rollout() -> Picture:
    """The stages of one rollout."""
    made = Picture(520, 96, "Stages of a rollout: prepare a sandbox, run the agent, grade, then a result.")
    stages = (
        ("prepare", "files, setup", ""),
        ("run", "agent + calls", "agent"),
        ("grade", "verifier", ""),
        ("result", "reward, tokens", "policy"),
    )
    for index, (text, small, kind) in enumerate(stages):
        x = 5 + index * 133
        made.box(x, 20, 108, 56, text, small=small, kind=kind)
        if index:
            made.arrow((x - 25, 48), (x, 48))
    return made


def group() -> Picture:
    """Rollouts of one task, compared with each other."""
    made = Picture(
        520, 150, "One task, four rollouts with rewards 1, 0, 1, 1, and the advantages that follow from them."
    )
    made.box(5, 50, 90, 50, "task")
    for index, (reward, advantage) in enumerate((("1", "+0.25"), ("0", "-0.75"), ("1", "+0.25"), ("1", "+0.25"))):
        y = 6 + index * 36
        made.arrow((95, 75), (155, y + 14))
        made.box(155, y, 110, 28, f"rollout {index}", kind="agent")
        made.arrow((265, y + 14), (310, y + 14))
        made.box(310, y, 80, 28, f"reward {reward}", kind="policy" if reward == "1" else "bad")
        made.text(450, y + 19, f"advantage {advantage}", "small")
    return made


def call() -> Picture:
    """A model call: a prompt in token ids, a completion in token ids."""
    made = Picture(520, 112, "A call: prompt token ids go to the engine, sampled ids with logprobs come back.")
    made.text(112, 18, "prompt", "small")
    made.cells(5, 26, 43, [("9906", ""), ("8948", ""), ("198", ""), ("2610", ""), ("525", "")])
    made.text(340, 18, "completion: sampled ids", "small")
    made.cells(260, 26, 43, [("785", "policy"), ("1887", "policy"), ("374", "policy"), ("13", "policy")])
    made.arrow((220, 39), (260, 39))
    made.text(340, 68, "and the logprob of each", "small")
    made.cells(260, 76, 43, [("-0.1", "policy"), ("-1.3", "policy"), ("-0.4", "policy"), ("-0.2", "policy")])
    made.text(470, 44, "policy 7", "small")
    return made


def turn() -> Picture:
    """A turn: the model's completion; between two of them stands what tools returned."""
    made = Picture(520, 92, "A conversation: the prompt, a turn, a tool's result, a turn, a tool's result, a turn.")
    parts = (
        ("task", ""),
        ("turn 0", "policy"),
        ("tool", "agent"),
        ("turn 1", "policy"),
        ("tool", "agent"),
        ("turn 2", "policy"),
    )
    for index, (text, kind) in enumerate(parts):
        made.box(5 + index * 86, 14, 78, 36, text, kind=kind)
    made.text(5, 78, "the policy wrote the turns: they are trained; it did not write the rest", "small left")
    return made


def branch() -> Picture:
    """A history that the agent changed, so that two sequences share a beginning."""
    made = Picture(
        520, 130, "Calls 0 and 1 are followed by call 2, and, after the agent rewrote its history, by calls 3 and 4."
    )
    for x, y, text, kind in (
        (5, 45, "call 0", "policy"),
        (125, 45, "call 1", "policy"),
        (245, 10, "call 2", "policy"),
        (245, 82, "call 3", "agent"),
        (365, 82, "call 4", "agent"),
    ):
        made.box(x, y, 90, 34, text, kind=kind)
    made.arrow((95, 62), (125, 62))
    made.arrow((215, 62), (230, 62), (230, 27), (245, 27))
    made.arrow((215, 62), (230, 62), (230, 99), (245, 99))
    made.arrow((335, 99), (365, 99))
    made.text(345, 32, "branch 0", "small left")
    made.text(465, 104, "branch 1", "small left")
    return made


def sample() -> Picture:
    """A sequence of tokens with its loss mask."""
    made = Picture(520, 112, "A sample: token ids, a loss mask that is 1 where the policy sampled, logprobs there.")
    kinds = ("", "", "policy", "policy", "", "", "policy", "policy")
    rows = (
        ("input_ids", ("8948", "198", "785", "1887", "77", "13", "374", "2"), 8),
        ("loss_mask", ("0", "0", "1", "1", "0", "0", "1", "1"), 42),
        ("logprobs", ("0", "0", "-0.1", "-1.3", "0", "0", "-0.4", "-0.2"), 76),
    )
    for name, values, y in rows:
        made.text(5, y + 18, name, "code left")
        made.cells(90, y, 53, list(zip(values, kinds, strict=True)))
    return made


def grade() -> Picture:
    """The three grades of a trajectory."""
    made = Picture(520, 84, "Grades: exact, usable, unusable.")
    grades = (
        ("EXACT", "ids as sampled, logprobs", "policy"),
        ("USABLE", "trainable, with a finding", "gate"),
        ("UNUSABLE", "not for training", "bad"),
    )
    for index, (text, small, kind) in enumerate(grades):
        made.box(5 + index * 173, 14, 163, 56, text, small=small, kind=kind)
    return made


def gate() -> Picture:
    """Calls wait at the gate until a trainer or an engine answers."""
    made = Picture(520, 140, "Calls of three agents wait at the gate; a trainer or an engine answers them.")
    for index in range(3):
        y = 8 + index * 44
        made.box(5, y, 90, 34, f"agent {index}", kind="agent")
        made.arrow((95, y + 17), (185, y + 17))
    made.box(185, 8, 100, 122, "gate", small="calls wait here", kind="gate")
    made.box(385, 14, 125, 46, "your trainer", kind="policy")
    made.box(385, 78, 125, 46, "or an engine", kind="policy")
    made.arrow((285, 37), (385, 37), text="call")
    made.arrow((385, 101), (285, 101), text="tokens", below=True)
    return made


def policy_version() -> Picture:
    """The weights change during a rollout; each token knows its version."""
    made = Picture(
        520, 104, "Six sampled tokens: three of policy version 7, three of version 8, after a weight update."
    )
    made.cells(60, 34, 66, [(f"token {index}", "policy" if index < 3 else "gate") for index in range(6)])
    made.text(159, 24, "version 7", "small")
    made.text(357, 24, "version 8", "small")
    made.arrow((258, 98), (258, 60))
    made.text(266, 92, "weights 8 are pushed", "small left")
    return made


DRAWINGS: Final[Mapping[str, Callable[[], Picture]]] = {
    "overview": overview,
    "concept-rollout": rollout,
    "concept-group": group,
    "concept-call": call,
    "concept-turn": turn,
    "concept-branch": branch,
    "concept-sample": sample,
    "concept-grade": grade,
    "concept-gate": gate,
    "concept-policy-version": policy_version,
}
"""By the name of their file in docs/images."""


def write() -> None:
    """Writes all files."""
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().file(), encoding="utf-8")


if __name__ == "__main__":
    write()
