"""What a reward file may say, and what of it is a failure of the verifier."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock_driver.domain.ports import Command
from penstock_driver.domain.rollout import Outcome, Reward, RolloutFailed, TurnReward, Verifier
from penstock_driver.grading.verifier import ParsedReward, in_range, parse_reward, passed_share
from penstock_driver.wire.to_proto import outcome_to_proto

VERIFIER = Verifier(commands=(Command(shell="true"),), reward_by_file=True)


def refusal(content: bytes, verifier: Verifier = VERIFIER) -> str:
    """Why it is no reward."""
    with pytest.raises(RolloutFailed) as caught:
        parsed = parse_reward(content)
        in_range(parsed.value, verifier, parsed.components)
    assert caught.value.failure.cause == "VERIFIER"
    assert not caught.value.failure.retriable
    assert len(caught.value.failure.message) < 2000
    return caught.value.failure.reason


@pytest.mark.requirement("R73")
@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"1", 1.0),
        (b" 0.5\n", 0.5),
        (b".5", 0.5),
        (b"1e-3", 0.001),
        (b"+1.", 1.0),
        (b"-0", 0.0),
        (b'{"reward": 1}', 1.0),
    ],
)
def test_a_number_is_a_reward(content: bytes, value: float) -> None:
    assert parse_reward(content) == ParsedReward(value)


@pytest.mark.requirement("R73", "R74", "R77")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "REWARD_ABSENT"),
        (b" \n\t", "REWARD_ABSENT"),
        (b"nan", "REWARD_OUT_OF_RANGE"),
        (b"-Infinity", "REWARD_OUT_OF_RANGE"),
        (b"1e999", "REWARD_OUT_OF_RANGE"),
        (b"9" * 60_000, "REWARD_OUT_OF_RANGE"),
        (b"1.0000001", "REWARD_OUT_OF_RANGE"),
        (b"-1e-9", "REWARD_OUT_OF_RANGE"),
        (b"1_0", "REWARD_INVALID"),
        (b"0x1", "REWARD_INVALID"),
        (b"1 1", "REWARD_INVALID"),
        (b"reward=1", "REWARD_INVALID"),
        (b"true", "REWARD_INVALID"),
        (b"\xff1", "REWARD_INVALID"),
        ("\N{ARABIC-INDIC DIGIT ONE}".encode(), "REWARD_INVALID"),
        (b"[1]", "REWARD_INVALID"),
        (b'{"reward": NaN}', "REWARD_OUT_OF_RANGE"),
        (b'{"reward": 1e999}', "REWARD_OUT_OF_RANGE"),
        (b'{"reward": ' + b"9" * 400 + b"}", "REWARD_OUT_OF_RANGE"),
        (b'{"reward": ' + b"9" * 6000 + b"}", "REWARD_INVALID"),
        (b'{"reward": true}', "REWARD_INVALID"),
        (b'{"reward": "1"}', "REWARD_INVALID"),
        (b'{"reward": null}', "REWARD_INVALID"),
        (b'{"components": {}}', "REWARD_INVALID"),
        (b'{"reward": 0, "reward": 1}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": {"a": 0, "a": 1}}', "REWARD_INVALID"),
        (b'{"reward": 0, "note": "x"}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": [1]}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": {"a": Infinity}}', "REWARD_OUT_OF_RANGE"),
        (b'{"reward": 0, "components": {"a": {"b": 1}}}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": {' + b",".join(b'"%d": 1' % n for n in range(300)) + b"}}", "REWARD_INVALID"),
        (b'{"reward": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "REWARD_INVALID"),
        (b'{"a": ' * 10_000, "REWARD_INVALID"),
        (b'{"reward": 0, "components": {"\\ud83d": 1}}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": {"a\\u0000": 1}}', "REWARD_INVALID"),
        (b'{"reward": 0, "components": {"' + b"a" * 300 + b'": 1}}', "REWARD_INVALID"),
    ],
)
def test_reward_outside_its_range_is_the_verifiers_failure(content: bytes, reason: str) -> None:
    """Nothing is clipped, read by halves, or taken for zero."""
    assert refusal(content) == reason


@pytest.mark.requirement("R73")
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_content_is_a_reward_or_a_failure_of_the_verifier(content: bytes) -> None:
    try:
        parsed = parse_reward(content)
    except RolloutFailed as error:
        assert error.failure.cause == "VERIFIER"
    else:
        assert math.isfinite(parsed.value)
        assert all(map(math.isfinite, parsed.components.values()))
        assert outcome_to_proto(Outcome(reward=Reward(parsed.value, 0.0, 1.0, parsed.components))).HasField("reward")


@pytest.mark.requirement("R73")
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2, unique=True).map(sorted),
    st.integers(1, 64),
    st.integers(0, 64),
)
@example([0.2, 1.0], 3, 3)
@example([-0.5, 0.3], 3, 3)
@example([-1.0, 0.1], 3, 3)
@example([-1.7e308, 1.7e308], 2, 1)
def test_a_share_of_passed_commands_is_in_any_range_and_exact_at_its_ends(
    bounds: list[float], commands: int, passing: int
) -> None:
    """Perfect work has the whole reward: whoever counts what is solved compares with the range's end."""
    (low, high), passed = bounds, min(commands, passing)
    verifier = Verifier(commands=VERIFIER.commands * commands, reward_by_file=False, range_min=low, range_max=high)
    value = in_range(passed_share(verifier, passed), verifier, {}).value
    if passed in (0, commands):
        assert value == (high if passed else low)
    right = Fraction(low) + (Fraction(high) - Fraction(low)) * passed / commands
    assert abs(Fraction(value) - right) <= Fraction(max(abs(low), abs(high), 1e-300)) / (1 << 50)


@pytest.mark.requirement("R73")
def test_components_have_their_declared_names_and_ranges() -> None:
    """A missing one, another one and one out of its range are failures."""
    verifier = Verifier(
        commands=VERIFIER.commands, reward_by_file=True, component_ranges={"tests": (0, 1), "style": (-1, 0)}
    )
    good = b'{"reward": 0.5, "components": {"tests": 1, "style": -0.5}}'
    parsed = parse_reward(good)
    assert in_range(parsed.value, verifier, parsed.components).components == {"tests": 1.0, "style": -0.5}
    assert refusal(b'{"reward": 0.5, "components": {"tests": 1}}', verifier) == "REWARD_INVALID"
    assert refusal(b'{"reward": 0.5, "components": {"tests": 1, "style": 0, "x": 1}}', verifier) == "REWARD_INVALID"
    assert refusal(b'{"reward": 0.5, "components": {"tests": 1, "style": 1}}', verifier) == "REWARD_OUT_OF_RANGE"
    assert refusal(b"0.5", verifier) == "REWARD_INVALID"


@pytest.mark.requirement("R135")
def test_a_verifier_rewards_turns_and_tokens() -> None:
    """Each of them by the index of its call, whatever the range of the whole reward."""
    content = b"""{"reward": 1, "turns": [
        {"call": 2, "reward": -3, "components": {"style": 0.5}}, {"call": 0, "tokens": [0.25, -1]}
    ]}"""
    assert parse_reward(content).turns == (
        TurnReward(-3.0, {"style": 0.5}, b"", 2),
        TurnReward(None, {}, struct.pack("<2f", 0.25, -1.0), 0),
    )


@pytest.mark.requirement("R135")
@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (b"{}", "REWARD_INVALID"),
        (b"[1]", "REWARD_INVALID"),
        (b"[{}]", "REWARD_INVALID"),
        (b'[{"call": 0}]', "REWARD_INVALID"),
        (b'[{"reward": 1}]', "REWARD_INVALID"),
        (b'[{"call": -1, "reward": 1}]', "REWARD_INVALID"),
        (b'[{"call": true, "reward": 1}]', "REWARD_INVALID"),
        (b'[{"call": 2147483648, "reward": 1}]', "REWARD_INVALID"),
        (b'[{"call": 0, "reward": null}]', "REWARD_INVALID"),
        (b'[{"call": 0, "reward": NaN}]', "REWARD_OUT_OF_RANGE"),
        (b'[{"call": 0, "reward": 1, "note": 1}]', "REWARD_INVALID"),
        (b'[{"call": 0, "reward": 1}, {"call": 0, "reward": 1}]', "REWARD_INVALID"),
        (b'[{"call": 0, "components": {"a": Infinity}}]', "REWARD_OUT_OF_RANGE"),
        (b'[{"call": 0, "tokens": 1}]', "REWARD_INVALID"),
        (b'[{"call": 0, "tokens": ["1"]}]', "REWARD_INVALID"),
        (b'[{"call": 0, "tokens": [-Infinity]}]', "REWARD_OUT_OF_RANGE"),
        (b'[{"call": 0, "tokens": [1e39]}]', "REWARD_OUT_OF_RANGE"),
        (b"[" + b",".join(b'{"call":%d,"reward":1}' % n for n in range(1025)) + b"]", "REWARD_INVALID"),
    ],
)
def test_an_invalid_turn_is_the_verifiers_failure(turns: bytes, reason: str) -> None:
    assert refusal(b'{"reward": 1, "turns": ' + turns + b"}") == reason
