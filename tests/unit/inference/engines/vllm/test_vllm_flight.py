"""One generation at vLLM, from vLLM's outputs: where it ends, and under which version it began."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock_chassis.errors import FailedPrecondition
from penstock_codec import tiny_tokenizer
from penstock_codec.decoding import Detokenizer
from penstock_inference.engines.base import FinishReason, GenerateRequest, Sampling, VersionSpan
from penstock_inference.engines.stops import StopTexts
from penstock_inference.engines.vllm.in_flight import Flight

TOKENIZER = Tokenizer.from_str(tiny_tokenizer.train_tokenizer(["a b c"], 300).decode())
A, B, C = (TOKENIZER.encode(char, add_special_tokens=False).ids[0] for char in "abc")


def flight(exact: int | None = None, version: int = 0, pinned: bool = False, **sampling: Any) -> Flight:
    wanted = GenerateRequest(
        "r", np.ones(1, np.int32), Sampling(**{"max_tokens": 10, **sampling}), exact_policy_version=exact
    )
    return Flight(wanted, version, 0.0, pinned=pinned)


def output(*ids: int, finish: str | None = None, versions: dict[int, tuple[int, int]] | None = None) -> Any:
    """A `RequestOutput`; `versions` are vLLM's own spans, which it reports at the end."""
    spans = [SimpleNamespace(version=str(v), start=s, end=e) for v, (s, e) in (versions or {}).items()]
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids), start_indices=list(range(len(ids))))
    completion = SimpleNamespace(
        token_ids=list(ids), logprobs=logprobs, finish_reason=finish, stop_reason=None, weight_versions=spans or None
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0, metrics=None)


@pytest.mark.requirement("R63")
def test_a_stop_text_that_min_tokens_suppressed_does_not_end_a_completion_later() -> None:
    one = flight(min_tokens=4, stop=("ab", "x" * 30))
    one.stop_texts = StopTexts(Detokenizer(TOKENIZER), one.request.sampling.stop, TOKENIZER.get_vocab_size())
    for token in (A, B, C, C, C):
        one.take(output(token))
    assert not one.over
    one.take(output(A, B, C))
    done = one.done()
    assert (done.finish_reason, done.stop_text) == (FinishReason.STOP, "ab")
    assert done.token_ids.tolist() == [A, B, C, C, C, A, B]


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("reported", [True, False])
def test_a_completion_that_another_version_began_fails_where_an_exact_one_was_required(reported: bool) -> None:
    """Weights came between admission and the first token. Before 0.32 vLLM does not report which weights sampled."""
    one = flight(exact=0)
    if not reported:
        one.version = 1
    one.take(output(A))
    with pytest.raises(FailedPrecondition) as caught:
        one.take(output(B, finish="length", versions={1: (0, 2)} if reported else None))
    one.fail(caught.value)
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert caught.value.metadata == {"policy_version": "1"}
    assert one.error is caught.value and one.finish is None and one.ended.is_set()


@pytest.mark.requirement("R87")
def test_a_stop_text_of_another_version_fails_where_an_exact_one_was_required() -> None:
    one = flight(exact=0, version=1, stop=("b",))
    one.stop_texts = StopTexts(Detokenizer(TOKENIZER), ("b",), TOKENIZER.get_vocab_size())
    with pytest.raises(FailedPrecondition):
        one.take(output(A, B))


@pytest.mark.requirement("R87")
def test_a_label_that_was_late_refuses_no_completion_that_the_required_version_began() -> None:
    """The first token was sampled before the weights changed, and arrived after."""
    one = flight(exact=0, version=1)
    one.take(output(A))
    one.take(output(B, finish="length", versions={0: (0, 1), 1: (1, 2)}))
    assert one.finish is FinishReason.LENGTH
    assert one.done().version_spans == (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2))


@pytest.mark.requirement("R87")
def test_an_aborted_request_without_tokens_needs_no_version() -> None:
    one = flight(exact=0, version=1)
    one.take(output(finish="abort"))
    assert one.finish is FinishReason.ABORT


@pytest.mark.requirement("R87", "R132")
def test_an_adapters_completion_keeps_the_version_of_its_admission() -> None:
    """vLLM's spans are those of the base weights."""
    one = flight(exact=4, version=4, pinned=True)
    one.take(output(A, finish="length", versions={1: (0, 1)}))
    assert one.done().version_spans == (VersionSpan(4, 0, 1),)
