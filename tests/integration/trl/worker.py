"""TRL's own harness worker, unchanged, over our session factory: prints the samples that it gives a trainer.

A program, since the worker starts its own process. Arguments: model directory, connection file, how many samples.
"""

from __future__ import annotations

import functools
import json
import queue
import sys
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from penstock.adapters.harness.session import SessionFactory
from penstock.client import Command, Inference, Task, Verifier

UNHEALTHY_AFTER_S = 240.0


def main(model: str, connection: str, wanted: int) -> None:
    """Runs the worker until it has given as many samples as are wanted."""
    PartialState()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(model, "tokenizer.json")))
    # TRL knows how to read the replies of well-known templates; where the agent owns its loop it reads none.
    tokenizer.response_schema = {"type": "object"}
    task = Task(
        task_id="copy-note",
        instruction="replaced by the prompt",
        setup=[Command(shell="echo word > note.txt")],
        verifier=Verifier(commands=[Command(shell="grep -q word out.txt")]),
    )
    worker = HarnessRolloutWorker(
        harness_session_factory=functools.partial(
            SessionFactory, "shell", task, target=Path(connection), options={"source": Inference()}
        ),
        model_name="m",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Copy note.txt to out.txt."}]}]),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[2],
        num_generations=2,
        max_inflight_tasks=2,
        temperature=1.0,
    )
    worker.start()
    samples: list[Any] = []
    try:
        while len(samples) < wanted:
            try:
                samples.append(worker.rollout_buffer.get(timeout=1.0))
            except queue.Empty:
                worker.check_health(UNHEALTHY_AFTER_S)
    finally:
        worker.stop()
    for sample in samples:
        told = {
            "input_ids": sample.input_ids.tolist(),
            "mask": sample.completion_mask.tolist(),
            "logprobs": sample.old_log_probs.tolist(),
            "advantage": sample.advantage,
            "reward": sample.metrics["rewards/harness_reward"],
            "said": sample.completion[-1]["content"],
        }
        print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
