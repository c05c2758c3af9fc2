"""slime: its rollout calls our generate function, and its manager converts the samples for the trainer."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from aiohttp import web
from tests.trainers.absent import absent
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, VERSION, Driven, Learned

# slime's manager imports SGLang, which needs a GPU, and a logger.
absent("sglang", "sglang_router", "wandb")

from slime.ray.rollout import RolloutManager  # noqa: E402
from slime.rollout.sglang_rollout import GenerateState, generate_rollout_async  # noqa: E402
from slime.utils.http_utils import init_http_client  # noqa: E402
from slime.utils.misc import load_function  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from penstock.client import FailureCause  # noqa: E402

ABORTS = web.AppKey("aborts", dict[str, bool])


def router(driven: Driven) -> web.Application:
    """In the place of SGLang's router, by its wire."""

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        if request.app[ABORTS]["now"]:
            return web.json_response({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
        assert asked["return_logprob"] and asked["sampling_params"]["max_new_tokens"] > 0
        ids, logprobs = driven.engine.answer(asked["input_ids"], request.headers["X-SMG-Routing-Key"])
        pairs = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs, "weight_version": str(VERSION)}
        return web.json_response({"text": "", "meta_info": meta})

    async def workers(_: web.Request) -> web.Response:
        return web.json_response({"workers": []})

    app = web.Application()
    app[ABORTS] = {"now": False}
    app.add_routes([web.post("/generate", generate), web.get("/workers", workers)])
    return app


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    sys.path.insert(0, str(EXAMPLES))
    runner = web.AppRunner(router(driven))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        args = arguments(driven, runner.addresses[0][1])
        lines, wrong = await _train_data(driven, args)
        runner.app[ABORTS]["now"] = True
        sample = await load_function(args.custom_generate_function_path)(
            args, Sample(index=0, label=TASK_IDS[0]), GenerateState(args).sampling_params
        )
        causes = [
            None if one.outcome is None or one.outcome.failure is None else one.outcome.failure.cause
            async for one in driven.ps.rollouts.list()
        ]
        if sample.status is not Sample.Status.ABORTED or sample.tokens or causes.count(FailureCause.CANCELLED) != 1:
            wrong.append(f"an aborted sample is {sample.status}; its rollout was not cancelled")
        return lines, wrong
    finally:
        await runner.cleanup()


async def _train_data(driven: Driven, args: Namespace) -> tuple[list[str], list[str]]:
    def data_source(count: int) -> list[list[Sample]]:
        return [
            [
                Sample(group_index=group, index=group * PER_TASK + number, prompt="see the task", label=task_id)
                for number in range(PER_TASK)
            ]
            for group, task_id in enumerate(TASK_IDS)
        ][:count]

    init_http_client(args)
    output, aborted = await generate_rollout_async(args, 0, data_source)
    samples = [sample for group in output.samples for sample in group]
    manager = MagicMock(args=args, custom_convert_samples_to_train_data_func=None, custom_reward_post_process_func=None)
    own = RolloutManager.__ray_metadata__.modified_class
    manager._post_process_rewards = lambda given: own._post_process_rewards(manager, given)
    data = own._convert_samples_to_train_data(manager, samples)
    lines, wrong = await driven.faults([learned(data, row) for row in range(len(samples))])
    if aborted:
        wrong.append(f"{len(aborted)} groups aborted")
    if any(sample.weight_versions != [str(VERSION)] for sample in samples):
        wrong.append("the weight versions are not the router's")
    if not np.allclose(data["rewards"], np.array(data["raw_reward"]) - 0.5):
        wrong.append("slime's rewards are not reward minus the group's mean")
    lines.append(f"train data of {len(samples)} samples: {', '.join(sorted(data))}")
    return lines, wrong


def arguments(driven: Driven, port: int) -> Namespace:
    """slime's arguments that its rollout reads."""
    return Namespace(
        advantage_estimator="grpo",
        ci_test=False,
        custom_convert_samples_to_train_data_path=None,
        custom_generate_function_path="slime_agent.generate",
        dynamic_sampling_filter_path=None,
        group_rm=False,
        grpo_std_normalization=False,
        hf_checkpoint=str(driven.model),
        mask_offpolicy_in_partial_rollout=False,
        n_samples_per_prompt=PER_TASK,
        over_sampling_batch_size=len(TASK_IDS),
        partial_rollout=False,
        reward_key=None,
        rewards_normalization=True,
        rollout_all_samples_process_path=None,
        rollout_batch_size=len(TASK_IDS),
        rollout_global_dataset=True,
        rollout_max_response_len=1024,
        rollout_num_engines=1,
        rollout_sample_filter_path=None,
        rollout_skip_special_tokens=False,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_temperature=1.0,
        rollout_top_k=-1,
        rollout_top_p=1.0,
        sglang_dp_size=1,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        sglang_server_concurrency=64,
        use_distributed_post=False,
    )


def learned(data: dict[str, Any], row: int) -> Learned:
    """A row of the train data; masks and logprobs are of the response."""
    ids, length = data["tokens"][row], data["response_lengths"][row]
    before = [0] * (len(ids) - length)
    return Learned.of(
        ids, [*before, *data["loss_masks"][row]], [*before, *data["rollout_log_probs"][row]], data["raw_reward"][row]
    )
