"""The arguments of the OpenEnv server's tool: whatever comes in, a rollout or a refusal by name comes out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.openenv import mcp
from penstock.adapters.openenv.frames import is_close
from penstock.adapters.openenv.rollout_arguments import Defaults, RunRollout, agent_of, options_of, parse, task_of
from penstock.adapters.openenv.sessions import Sessions
from penstock.client import Inference, InvalidArgument, Mode, RewardFrom, Sampling, Upstream

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
ASKED: dict[str, Any] = {"instruction": "x", "endpoint": "inference"}


def options(**changes: Any) -> Any:
    """What a call with these arguments asks of the driver."""
    return options_of(parse(ASKED | changes), Defaults(), None, {})


@pytest.mark.requirement("R63", "R80")
@given(st.dictionaries(st.sampled_from(sorted(RunRollout.model_fields)) | st.text(max_size=8), JSON, max_size=6))
def test_any_arguments_make_a_rollout_or_are_refused_by_name(arguments: dict[str, Any]) -> None:
    """Nothing but the one typed error comes out, whatever a caller sends."""
    try:
        asked = parse(arguments)
        options_of(asked, Defaults(), 1, {})
    except InvalidArgument as error:
        assert error.reason in ("OPENENV_ARGUMENTS", "COMMAND", "UPSTREAM")
        return
    assert task_of(asked).instruction == arguments["instruction"]


@pytest.mark.requirement("R8")
def test_a_refusal_repeats_no_value_of_the_callers() -> None:
    """A key that was sent in the wrong place is in no message."""
    key = "sk-test '$(leak)"
    for arguments in ({"instruction": "x", "api_key": [key]}, {"instruction": "x", "sk": key}, {"mode": {"a": key}}):
        with pytest.raises(InvalidArgument) as refused:
            parse(arguments)
        assert key not in str(refused.value) + repr(refused.value.violations)
    assert key not in repr(parse({"instruction": "x", "api_key": key}))


@pytest.mark.requirement("R63", "R64")
def test_arguments_keep_their_meaning() -> None:
    """Defaults, caps, thinking and seeds, as the predecessor's tool had them."""
    given = options()
    assert (given["mode"], given["limits"].agent, given["budgets"].max_tokens_per_call) == (
        Mode.TRANSPARENT_PROXY,
        600.0,
        4096,
    )
    assert isinstance(given["source"], Inference)
    assert "sampling" not in given
    assert "budgets" not in options(max_tokens_cap=0)
    assert options(disable_thinking=True)["sampling"] == Sampling(thinking=False)
    assert "sampling" not in options(disable_thinking=False)
    assert options_of(parse(ASKED), Defaults(), 7, {})["sampling"].seed == 7
    assert options(endpoint="openai", model="m")["source"] == Upstream(name="openai", model="m")
    own = {"base_url": "http://h/v1/", "api_key": "k", "model": "m"}
    assert options(endpoint="", **own)["source"] == Upstream(base_url="http://h/v1", api_key="k", model="m")
    assert options(endpoint="openai", **own)["source"] == Upstream(base_url="http://h/v1", api_key="k", model="m")
    assert "source" not in options(endpoint="", mode="interception_gate")
    assert options(template="t")["sandbox"].image == "t"
    assert options_of(parse({"instruction": "x"}), Defaults(endpoint="up"), None, {})["source"] == Upstream(name="up")


@pytest.mark.requirement("R68")
def test_permissions_are_skipped_where_operator_or_caller_says_so() -> None:
    """Unset and false are different."""
    for operator in (False, True):
        defaults = Defaults(agent="pi", skip_permissions=operator)
        assert agent_of(parse(ASKED), defaults).skip_permissions is operator
        assert agent_of(parse(ASKED | {"skip_permissions": False}), defaults).skip_permissions is False
        assert agent_of(parse(ASKED), defaults).name == "pi"


@pytest.mark.requirement("R72", "R73")
def test_reward_is_the_passed_share_or_a_file_no_agent_had() -> None:
    plain = task_of(parse(ASKED | {"verify": ["a", "b"]})).verifier
    filed = task_of(parse(ASKED | {"verify": ["echo 1 > $PENSTOCK_REWARD_FILE"], "reward_range": [-1, 2]})).verifier
    said = task_of(parse(ASKED | {"verify": ["./grade"], "reward": "file"})).verifier
    assert plain is not None and filed is not None and said is not None
    assert (plain.reward, filed.reward, said.reward) == (RewardFrom.PASSED_SHARE, RewardFrom.FILE, RewardFrom.FILE)
    assert (plain.range, filed.range) == (None, (-1, 2))
    assert task_of(parse(ASKED)).verifier is None


@pytest.mark.requirement("R8", "R33")
@given(JSON)
def test_any_json_gets_one_answer_of_the_protocol(message: Any) -> None:
    """A result or an error with a code, never an exception."""
    sessions: Any = Sessions(None, Defaults(), most=1, idle_s=1.0)  # type: ignore[arg-type]
    told = asyncio.run(mcp.answer(message, sessions))
    assert told["jsonrpc"] == "2.0"
    assert ("result" in told) != ("error" in told)


@pytest.mark.requirement("R80")
def test_only_a_short_message_of_its_own_closes_a_connection() -> None:
    """A long message is no close, however it begins."""
    assert is_close('{"type": "close"}')
    assert not is_close('{"type": "state"}')
    assert not is_close("[" * 200)
    assert not is_close('{"type": "close", "x": "' + "y" * 400 + '"}')
