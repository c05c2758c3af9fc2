"""SkyRL (0.3.0): the `GeneratorOutput` that a generator gives its trainer.

Forms: skyrl/train/generators/base.py (`GeneratorOutput`) and skyrl/train/utils/trainer_utils.py
(`validate_generator_output`), of skyrl 0.3.0 on PyPI.
"""

from typing import TypedDict

from penstock.adapters.trainers.experts import experts_of, with_last
from penstock.adapters.trainers.selection import Place, Row, Selection
from penstock.client.errors import InvalidArgument


class TrajectoryId(TypedDict):
    """The fields of SkyRL's `TrajectoryID`."""

    instance_id: str
    repetition_id: int


class GeneratorOutput(TypedDict):
    """The entries of a `GeneratorOutput` for text rollouts; make `TrajectoryID`s of `trajectory_ids`."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[TrajectoryId]
    is_last_step: list[bool] | None
    rollout_expert_indices: list[list[list[list[int]]]] | None


def generator_output(selection: Selection, *, filler_token_id: int, step_wise: bool = False) -> GeneratorOutput:
    """Returns one row per rollout in order; with `step_wise` one per sequence, those of a rollout side by side.

    Routed experts, if the sequences have them, are of prompt and response, 0 for the last token.

    SkyRL needs a row for each prompt, and has no rollouts without a reward. A dropped rollout is a single masked token
    with the mean reward of its group's kept rollouts: it is not trained, and moves no baseline.

    Args:
        selection: in the order of the generator's prompts; of `select(results, one_sequence=True)`
            unless `step_wise`.
        filler_token_id: for dropped rollouts; the tokenizer's padding.
        step_wise: as SkyRL's `generator.step_wise_trajectories`. SkyRL then computes the advantage from the last row's
            reward and gives it to all rows of the rollout, so that a rollout counts once.

    Raises:
        InvalidArgument: `SEVERAL_SEQUENCES`, a rollout has more than one, and it is not step-wise; as `experts_of`.
    """
    experts = experts_of(selection.rows)
    output = GeneratorOutput(
        prompt_token_ids=[], response_ids=[], rewards=[], loss_masks=[], stop_reasons=[], rollout_metrics={},
        rollout_logprobs=[], trajectory_ids=[], is_last_step=[] if step_wise else None,
        rollout_expert_indices=None if experts is None else [],
    )  # fmt: skip
    repetitions: dict[str, int] = {}
    for place in selection.places:
        if len(place.rows) > 1 and not step_wise:
            raise InvalidArgument(
                f"Rollout {place.rollout_id} has {len(place.rows)} sequences: use select(results, "
                "one_sequence=True), or step_wise=True",
                reason="SEVERAL_SEQUENCES",
            )
        repetition = repetitions.get(place.group, 0)
        repetitions[place.group] = repetition + 1
        rows: tuple[Row | None, ...] = place.rows or (None,)
        for number, row in enumerate(rows, 1):
            _add(output, selection, place, row, filler_token_id, number == len(rows))
            output["trajectory_ids"].append(TrajectoryId(instance_id=place.group, repetition_id=repetition))
    if experts is not None:
        own = iter(experts)
        # A dropped rollout is masked: SkyRL fills up with zeros what has no rows.
        output["rollout_expert_indices"] = [
            with_last(next(own)).tolist() if place.rows else []
            for place in selection.places
            for _ in place.rows or (0,)
        ]
    kept = [place for place in selection.places if place.rows]
    output["rollout_metrics"] = {
        "penstock/rollouts": float(len(kept)),
        "penstock/dropped": float(len(selection.places) - len(kept)),
        "penstock/sequences": float(len(selection.rows)),
    }
    return output


def _add(
    output: GeneratorOutput, selection: Selection, place: Place, row: Row | None, filler_token_id: int, last: bool
) -> None:
    reward = selection.group_reward(place.group) if row is None else row.reward
    output["prompt_token_ids"].append([filler_token_id] if row is None else row.prompt_ids.tolist())
    output["response_ids"].append([filler_token_id] if row is None else row.response_ids.tolist())
    output["rewards"].append(reward if last else 0.0)
    output["loss_masks"].append([0] if row is None else row.response_mask.astype(int).tolist())
    output["stop_reasons"].append("error" if row is None else "length" if row.sample.truncated else "stop")
    output["rollout_logprobs"].append([0.0] if row is None else row.response_logprobs.tolist())
    if output["is_last_step"] is not None:
        output["is_last_step"].append(last)
