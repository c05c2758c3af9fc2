"""What the plug-ins record of an answer of the trainer's engine; the trainers' classes are stand-ins by their form."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.adapters.trainers.plugins.rollouts import sampling_sent
from penstock.client import Completion, InvalidArgument, Sampling
from penstock.client.types.chat import LogprobsMode

FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
USED = Sampling(temperature=0.7, **FILTERS)
CALL: Any = SimpleNamespace(
    prompt_token_ids=np.array([5, 6], np.int32), prompt_count=2, sampling=Sampling(), rollout_id="r"
)

Load = Callable[[str, Mapping[str, Mapping[str, Any]]], ModuleType]


class Base:
    """A class of a trainer's, also a generic one."""

    def __class_getitem__(cls, _: Any) -> type[Base]:
        return cls


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a plug-in where the trainer's modules have the given names only."""

    def found(plugin: str, trainer: Mapping[str, Mapping[str, Any]]) -> ModuleType:
        for path, names in trainer.items():
            parents = path.split(".")
            for end in range(1, len(parents)):
                parent = ".".join(parents[:end])
                if parent not in trainer:
                    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            module = ModuleType(path)
            module.__dict__.update(names)
            monkeypatch.setitem(sys.modules, path, module)
        name = f"penstock.adapters.trainers.plugins.{plugin}"
        made = importlib.import_module(name)
        del sys.modules[name]  # other tests have other stand-ins
        return made

    return found


async def of_verl(load: Load, params: dict[str, Any], **config: Any) -> Completion:
    plugin = load("verl", {"verl.experimental.agent_loop.agent_loop": {"AgentLoopBase": Base, "AgentLoopOutput": Base}})
    loop = plugin.PenstockAgentLoop.__new__(plugin.PenstockAgentLoop)
    loop.rollout_config = SimpleNamespace(
        max_model_len=64, **{"name": "vllm", "logprobs_mode": "processed_logprobs", **config}
    )

    async def generate(**_: Any) -> Any:
        return SimpleNamespace(token_ids=[7, 8], log_probs=[-0.5, -0.5], extra_fields={})

    loop.server_manager = SimpleNamespace(generate=generate)
    made: Completion = await loop._sample(CALL, params)
    return made


async def of_skyrl(load: Load, params: dict[str, Any], **options: Any) -> Completion:
    base = {"InferenceEngineInput": dict, "InferenceEngineInterface": Base}
    names = ("GeneratorInput", "GeneratorInterface", "GeneratorOutput", "TrajectoryID")
    plugin = load(
        "skyrl",
        {
            "skyrl.backends.skyrl_train.inference_servers.base": base,
            "skyrl.train.generators.base": dict.fromkeys(names, Base),
        },
    )

    async def generate(_: Any) -> Any:
        return {"response_ids": [[7, 8]], "response_logprobs": [[-0.5, -0.5]], "stop_reasons": ["stop"]}

    generator = plugin.PenstockGenerator(None, SimpleNamespace(generate=generate), filler_token_id=0, **options)
    made: Completion = await generator._sample(CALL, params)
    return made


async def of_slime(load: Load, params: dict[str, Any]) -> Completion:
    async def post(*_: Any, **__: Any) -> Any:
        pairs = [[-0.5, 7, None], [-0.5, 8, None]]
        return {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs}}

    plugin = load(
        "slime",
        {
            "slime.rollout.sglang_rollout": {"GenerateState": Base},
            "slime.utils": {"http_utils": SimpleNamespace(post=post)},
            "slime.utils.types": {"Sample": Base},
        },
    )
    args = Namespace(sglang_router_ip="127.0.0.1", sglang_router_port=1)
    made: Completion = await plugin._sample(args, CALL, {**params, "max_new_tokens": 8})
    return made


async def of_openrlhf(load: Load, params: dict[str, Any]) -> Completion:
    plugin = load("openrlhf", {"openrlhf.utils.agent": {"AgentExecutorBase": Base}})
    logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in (7, 8)]

    async def generate(*_: Any) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7, 8], logprobs=logprobs, finish_reason="stop")])

    made: Completion = await plugin._sample(CALL, SimpleNamespace(**params), 64, SimpleNamespace(generate=generate))
    return made


async def of_verifiers(load: Load, params: dict[str, Any]) -> Completion:
    plugin = load(
        "verifiers",
        {
            "verifiers.v1": dict.fromkeys(("Taskset", "Task", "TasksetConfig", "Harness", "HarnessConfig"), Base),
            "verifiers.v1.clients.base": {"build_async_openai": None},
            "verifiers.v1.clients.client": {"SESSION_ID_HEADER": "X-Session-ID"},
            "verifiers.v1.graph": {"MessageNode": Base},
            "verifiers.v1.runtimes": {"ProgramResult": Base},
            "verifiers.v1.trace": {"ModelCall": Base},
        },
    )
    choice = {"token_ids": [7, 8], "logprobs": {"content": [{"logprob": -0.5}] * 2}, "finish_reason": "stop"}

    async def post(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(json=lambda: {"choices": [choice]})

    client = SimpleNamespace(base_url="http://127.0.0.1:1/v1", post=post)
    ctx = SimpleNamespace(model="policy", sampling=SimpleNamespace(model_dump=lambda **_: dict(params)))
    made: Completion = await plugin._sample(client, ctx, "s", CALL)
    return made


PLUGINS = [of_verl, of_skyrl, of_slime, of_openrlhf, of_verifiers]


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("plugin", PLUGINS)
async def test_an_answer_is_recorded_with_every_filter_that_was_sent(load: Load, plugin: Any) -> None:
    """Logprobs of a filtered distribution cannot be told from others without them."""
    made = await plugin(load, {"temperature": 0.7, **FILTERS})
    assert made.sampling_used == USED


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("off", [-1, 0, None])
def test_no_top_k_is_recorded_where_none_was_in_force(off: int | None) -> None:
    """The engines' signs for it, and parameters that are unset."""
    assert sampling_sent({"temperature": 1.0, "top_k": off, "min_p": None}) == Sampling(temperature=1.0)
    assert sampling_sent(SimpleNamespace(temperature=1.0, top_k=off, max_tokens=9)) == Sampling(temperature=1.0)


@pytest.mark.requirement("R87")
@pytest.mark.parametrize(
    ("made_by", "options", "mode"),
    [
        (of_skyrl, {}, LogprobsMode.RAW),
        (of_skyrl, {"engine_init_kwargs": {"dtype": "bfloat16"}}, LogprobsMode.RAW),
        (of_skyrl, {"engine_init_kwargs": {"logprobs_mode": "raw_logprobs"}}, LogprobsMode.RAW),
        (of_skyrl, {"engine_init_kwargs": {"logprobs_mode": "processed_logprobs"}}, LogprobsMode.PROCESSED),
        (of_verl, {"logprobs_mode": "processed_logprobs"}, LogprobsMode.PROCESSED),
        (of_verl, {"logprobs_mode": "raw_logprobs"}, LogprobsMode.RAW),
        (of_verl, {"logprobs_mode": None}, LogprobsMode.RAW),
        (of_verl, {"logprobs_mode": "raw_logprobs", "name": "sglang"}, LogprobsMode.PROCESSED),
    ],
)
async def test_logprobs_are_of_the_kind_that_the_trainers_engine_returns(
    load: Load, made_by: Any, options: dict[str, Any], mode: LogprobsMode
) -> None:
    """vLLM's are raw unless it is told otherwise; SGLang has no such setting."""
    assert (await made_by(load, {"temperature": 0.7}, **options)).logprobs_mode is mode


@pytest.mark.requirement("R87")
async def test_logits_are_no_logprobs(load: Load) -> None:
    """vLLM returns them in their place if it is asked to."""
    with pytest.raises(InvalidArgument, match="raw_logits") as raised:
        await of_verl(load, {}, logprobs_mode="raw_logits")
    assert raised.value.reason == "NO_LOGPROBS"
