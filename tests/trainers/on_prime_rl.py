"""prime-rl: verifiers runs our taskset and harness in its own environment, and prime-rl packs the traces."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from prime_rl.orchestrator.trajectories import trace_to_samples
from prime_rl.trainer.batch import build_bin_cost, prepare_batch
from tests.support.endpoints.loopback import serving
from tests.trainers.driven import EXAMPLES, PER_TASK, Driven, Learned
from verifiers.v1.agent import Agent
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import default_harness_id, harness_config_type, load_taskset

from penstock.adapters.trainers import prime_rl, select

LENGTH = 4096
MODULE = "penstock_agent"


def server(driven: Driven) -> web.Application:
    """In the place of prime-rl's inference servers, by the wire of vLLM's /inference/v1/generate."""

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["model"] == "policy" and asked["sampling_params"]["logprobs"] == 1
        ids, logprobs = driven.engine.answer(asked["token_ids"], request.headers["X-Session-ID"])
        content = [
            {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return web.json_response({"request_id": "r", "choices": [choice]})

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    return app


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    sys.path.insert(0, str(EXAMPLES))
    async with serving(server(driven)) as url:
        traces = await _traces(f"{url}/v1")
    if faults := [error.message for trace in traces for error in trace.errors]:
        return [], faults
    made = []
    for trace in traces:
        (sample,) = trace_to_samples(trace, env_name="tasks")
        # As TrainSink does for its scalar algorithms: one advantage for a rollout's tokens, one temperature.
        sample.advantages = [(trace.reward - 0.5) * kept for kept in sample.mask]
        sample.temperatures = [1.0] * len(sample.token_ids)
        made.append((sample, trace.reward))
    lines, wrong = await driven.faults(
        [Learned.of(one.token_ids, one.mask, one.logprobs, reward) for one, reward in made]
    )
    if any(not trace.ok or trace.num_turns != 3 for trace in traces):
        wrong.append(f"traces: {[(trace.ok, trace.num_turns) for trace in traces]}")
    wrong += await _form_differs(driven, traces, [one for one, _ in made])
    (batches,) = prepare_batch([one for one, _ in made], LENGTH, 1, build_bin_cost(None))
    trained = sum(sum(one.loss_mask) for one in batches)
    if trained != sum(sum(one.mask) for one, _ in made):
        wrong.append(f"the micro batches train {trained} tokens")
    lines.append(f"{len(made)} TrainingSamples, packed by prime-rl into {len(batches)} micro batches")
    return lines, wrong


async def _traces(base_url: str) -> list[Any]:
    """verifiers' own agent on each task of our taskset."""
    taskset = load_taskset(vf.TasksetConfig(id=MODULE))
    ident = default_harness_id(MODULE)
    config = AgentConfig(
        harness=harness_config_type(ident)(id=ident),
        runtime=SubprocessConfig(),
        model="policy",
        client=vf.TrainClientConfig(base_url=base_url),
        sampling=vf.SamplingConfig(temperature=1.0, top_p=1.0),
    )
    async with Agent(config) as agent:
        return await asyncio.gather(*(agent.run(task) for task in taskset for _ in range(PER_TASK)))


async def _form_differs(driven: Driven, traces: list[Any], samples: list[Any]) -> list[str]:
    """Compares `prime_rl.training_samples`, the form without a plug-in, with prime-rl's own samples."""
    trajectories = [
        await (await driven.ps.rollouts.attach(trace.info["penstock_rollout_id"])).trajectory() for trace in traces
    ]
    ours = [type(samples[0])(**one) for one in prime_rl.training_samples(select(trajectories), env_name="tasks")]
    return [] if ours == samples else ["prime_rl.training_samples differs from prime-rl's samples"]
