"""slime: the `Sample`s of a rollout function, as the dicts that `Sample.from_dict` accepts.

Form: slime/utils/types.py (`Sample`) of https://github.com/THUDM/slime at 0d234f3, and `Sample.rollout_id`, which later
versions have. Groups as slime/ray/rollout.py (`_post_process_rewards`) normalises their rewards at 624b824, and routed
experts as slime/observability/rollout_data_utils.py checks them there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.experts import as_type, experts_of, in_all_layers
from penstock.adapters.trainers.selection import Place, Row, Selection, only_row


class Sample(TypedDict):
    """The fields of a `Sample`; `Sample.from_dict(it)` makes it."""

    group_index: int
    index: int
    rollout_id: int
    prompt: str
    tokens: list[int]
    response: str
    response_length: int
    reward: float
    loss_mask: list[int]
    weight_versions: list[str]
    rollout_log_probs: list[float]
    remove_sample: bool
    status: str
    session_id: str
    metadata: dict[str, Any]
    rollout_routed_experts: NotRequired[NDArray[np.int32]]


def samples(
    selection: Selection,
    *,
    filler_token_id: int,
    first_group_index: int = 0,
    first_index: int = 0,
    decode: Callable[[list[int]], str] | None = None,
    dense_layers: Sequence[int] = (),
) -> list[list[Sample]]:
    """Returns groups of samples, a sample per rollout.

    slime normalises rewards over groups of `n_samples_per_prompt` samples, and with any other count over the whole
    batch as one group. So a rollout has one sample, and a dropped one keeps its place: a masked sample
    (`remove_sample`, status "aborted") with the mean reward of its group's kept rollouts, which moves no baseline.

    Args:
        selection: of `select(results, one_sequence=True)`, of any number of groups.
        filler_token_id: for dropped rollouts; the tokenizer's padding.
        first_group_index, first_index: of the first group and rollout; the others count on.
        decode: the tokenizer's, for texts; None = empty ones.
        dense_layers: the layers of a mixture-of-experts model that have no experts, from 0: slime expects routed
            experts, if the sequences have them, of all layers, and of all tokens but the last.

    Raises:
        InvalidArgument: `SEVERAL_SEQUENCES`, a rollout has more than one; as `experts_of` and `in_all_layers`.
    """
    experts = experts_of(selection.rows)
    own = iter([in_all_layers(as_type(one, np.int32), dense_layers) for one in experts or ()])
    groups: dict[str, list[Sample]] = {place.group: [] for place in selection.places}
    numbers = {group: number for number, group in enumerate(groups, first_group_index)}
    for index, place in enumerate(selection.places, first_index):
        members, row = groups[place.group], only_row(place, "slime")
        if row is not None:
            members.append(_sample(row, numbers[place.group], index, decode))
            if experts is not None:
                members[-1]["rollout_routed_experts"] = next(own)
        else:
            members.append(_filler(selection, place, numbers[place.group], index, filler_token_id))
            if experts:
                # One row, for two tokens: slime takes zeros in all layers for a capture that failed.
                layers, count = experts[0].shape[1] + len(dense_layers), experts[0].shape[2]
                members[-1]["rollout_routed_experts"] = np.tile(np.arange(count, dtype=np.int32), (1, layers, 1))
    return list(groups.values())


def _sample(row: Row, group_index: int, index: int, decode: Callable[[list[int]], str] | None) -> Sample:
    response = row.response_ids.tolist()
    return Sample(
        group_index=group_index,
        index=index,
        rollout_id=index,
        prompt=decode(row.prompt_ids.tolist()) if decode else "",
        tokens=row.sample.input_ids.tolist(),
        response=decode(response) if decode else "",
        response_length=len(response),
        reward=row.reward,
        loss_mask=row.response_mask.astype(int).tolist(),
        weight_versions=[str(version) for version in row.policy_versions],
        rollout_log_probs=row.response_logprobs.tolist(),
        remove_sample=False,
        status="truncated" if row.sample.truncated else "completed",
        session_id=row.trajectory.rollout_id,
        metadata={
            "sample_id": row.sample.sample_id,
            "branch_class": row.sample.branch_class,
            "weight": row.sample.weight,
            "trained_tokens": int(np.count_nonzero(row.sample.loss_mask)),
        },
    )


def _filler(selection: Selection, place: Place, group_index: int, index: int, filler_token_id: int) -> Sample:
    return Sample(
        group_index=group_index,
        index=index,
        rollout_id=index,
        prompt="",
        tokens=[filler_token_id, filler_token_id],
        response="",
        response_length=1,
        reward=selection.group_reward(place.group),
        loss_mask=[0],
        weight_versions=[],
        rollout_log_probs=[0.0],
        remove_sample=True,
        status="aborted",
        session_id=place.rollout_id,
        metadata={"dropped": str(place.dropped)},
    )
