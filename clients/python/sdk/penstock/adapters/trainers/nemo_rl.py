"""NeMo RL: the message logs of its rollouts, as numpy arrays; `torch.from_numpy` makes its tensors of them.

Form: nemo_rl/environments/nemo_gym.py (`_postprocess_nemo_gym_to_nemo_rl_result`) and
nemo_rl/models/generation/interfaces.py of https://github.com/NVIDIA-NeMo/RL at 7ea279a: messages whose tokens, end to
end, are the sequence. NeMo RL trains the assistant's.
"""

from typing import Any, Final, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.adapters.trainers.experts import as_type, experts_of, with_last
from penstock.adapters.trainers.selection import Row, Selection, trained_runs

MISSING: Final = -1
"""The id of NeMo RL for a token without routes: the trainer's own router chooses."""
_DTYPES: Final[dict[str, type[np.signedinteger[Any]]]] = {"int8": np.int8, "int16": np.int16, "int32": np.int32}


class Message(TypedDict):
    """A message: `token_ids` int64, `generation_logprobs` float32 of the assistant's; `routed_experts`, if there are
    any, (tokens, layers, experts per token).
    """

    role: Literal["user", "assistant"]
    content: str
    token_ids: NDArray[np.int64]
    generation_logprobs: NotRequired[NDArray[np.float32]]
    routed_experts: NotRequired[NDArray[Any]]


def message_logs(
    selection: Selection, *, routed_experts_dtype: Literal["int8", "int16", "int32"] = "int16"
) -> list[list[Message]]:
    """Returns a message log per sequence: the assistant's messages are what is trained, all else is the user's.

    Args:
        selection: of any number of groups.
        routed_experts_dtype: as NeMo RL's `resolve_routed_experts_dtype` has it for the model: int8 up to 128 experts,
            int16 up to 32,768.

    Raises:
        InvalidArgument: `TENSOR_SHAPE`, an expert's id does not fit; as `experts_of`.
    """
    rows = selection.rows
    experts = experts_of(rows, fill=MISSING)
    dtype = _DTYPES[routed_experts_dtype]
    return [
        _log(row, None if experts is None else as_type(with_last(experts[index], MISSING), dtype))
        for index, row in enumerate(rows)
    ]


def _log(row: Row, experts: NDArray[Any] | None) -> list[Message]:
    log: list[Message] = []
    ids, at = row.sample.input_ids.astype(np.int64), 0

    def add(role: Literal["user", "assistant"], start: int, end: int) -> None:
        message = Message(role=role, content="", token_ids=ids[start:end])
        if role == "assistant":
            message["generation_logprobs"] = row.logprobs[start:end]
        if experts is not None:
            message["routed_experts"] = experts[start:end]
        log.append(message)

    for start, end in trained_runs(row.sample.loss_mask):
        if start > at:
            add("user", at, start)
        add("assistant", start, end)
        at = end
    if at < len(ids):
        add("user", at, len(ids))
    return log
