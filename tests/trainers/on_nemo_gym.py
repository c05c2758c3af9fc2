"""NeMo-Gym: its collection of rollouts asks our agent server, its model server answers, and NeMo-RL makes tensors."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
import uvicorn
from aiohttp import web
from omegaconf import DictConfig, OmegaConf
from tests.support.policy import CODEC
from tests.trainers.absent import absent
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, Driven, Learned

absent("pynvml", "wandb")
# NeMo-RL refuses later ones, whose tokenizers of DeepSeek-V3 need no mending; it has no say in what is checked here.
transformers.__version__ = "5.11.0"
importlib.import_module("nemo_rl.models.policy")

import nemo_rl  # noqa: E402
from environment_servers.legacy_agent.app import LegacyAgentEnvironmentServer  # noqa: E402
from nemo_gym.config_types import BaseServerConfig  # noqa: E402
from nemo_gym.rollout_collection import RolloutCollectionHelper  # noqa: E402
from nemo_gym.server_utils import (  # noqa: E402
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    get_global_aiohttp_client,
    set_global_aiohttp_client,
)
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message  # noqa: E402
from nemo_rl.environments.nemo_gym import NemoGym  # noqa: E402
from nemo_rl.experience.failures import http_status_is_infra  # noqa: E402
from nemo_rl.models.generation.openai_server_utils import replace_prefix_tokens  # noqa: E402
from responses_api_models.vllm_model.app import VLLMModel  # noqa: E402

HOST = "127.0.0.1"
FOLDER = EXAMPLES / "responses_api_agents" / "penstock_agent"
TOOL_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.S)


class Engine:
    """In the place of NeMo-RL's vLLM, by its wire: it renders messages, and continues what it sampled before."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(driven.model)
        self.drifts = False
        """Whether it renders another prompt than it should."""
        self.room = sys.maxsize
        """The longest prompt in tokens."""

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.chat)])
        return app

    async def chat(self, request: web.Request) -> web.Response:
        """See vLLM, and nemo_rl/models/generation/vllm/vllm_worker_async.py."""
        asked = await request.json()
        assert asked["logprobs"] and asked["return_tokens_as_token_ids"] and asked["temperature"] == 1.0
        prompt = self.prompt(asked["messages"], asked.get("tools"))
        if len(prompt) > self.room:
            text = f"This model's maximum context length is {self.room} tokens."
            return web.json_response({"object": "error", "message": text, "code": 400}, status=400)
        ids, logprobs = self.driven.engine.answer(prompt)
        text = CODEC.decode(ids[:-1])
        calls = [
            {
                "id": f"call-{len(prompt)}",
                "type": "function",
                "function": {**made, "arguments": json.dumps(made["arguments"])},
            }
            for made in map(json.loads, TOOL_CALL.findall(text))
        ]
        message = {
            "role": "assistant",
            "content": None if calls else text,
            "tool_calls": calls,
            "prompt_token_ids": [*prompt, 1] if self.drifts else prompt,
            "generation_token_ids": ids,
            "generation_log_probs": logprobs,
        }
        content = [{"token": f"token_id:{one}", "logprob": two} for one, two in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "finish_reason": "tool_calls" if calls else "stop",
            "message": message,
            "logprobs": {"content": [{**one, "bytes": None, "top_logprobs": []} for one in content]},
        }
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    def prompt(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """The rendered conversation; its part up to the last answer is replaced by what was sampled."""
        for message in messages:
            for call in message.get("tool_calls") or []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        whole = self.rendered(messages, tools, generation=True)
        last = max((at for at, one in enumerate(messages) if one["role"] == "assistant"), default=None)
        if last is None:
            return whole
        sampled = messages[last]
        continued: list[int] = replace_prefix_tokens(
            self.tokenizer,
            sampled["prompt_token_ids"] + sampled["generation_token_ids"],
            self.rendered(messages[: last + 1], tools, generation=False),
            whole,
        )
        return continued

    def rendered(self, messages: list[dict[str, Any]], tools: Any, *, generation: bool) -> list[int]:
        """By the model's template."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, tokenize=True, return_dict=False
        )
        return ids


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    engine = Engine(driven)
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    try:
        async with started(engine, folder) as client:
            rows = [row(task_id) for task_id in TASK_IDS for _ in range(PER_TASK)]
            made = await collected(client, rows)
            lines, wrong = await judged(driven, engine, made)
            wrong += await _failures(client, engine)
    finally:
        await get_global_aiohttp_client().close()
    return lines, wrong


async def judged(driven: Driven, engine: Engine, made: list[tuple[Any, Any]]) -> tuple[list[str], list[str]]:
    """What NeMo-RL makes of NeMo-Gym's results, up to the tensors of its loss."""
    kinds = {item["type"] for _, result in made for item in result["response"]["output"]}
    gym = SimpleNamespace(cfg={}, _processor=None)
    convert = NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result
    results = [convert(gym, given, result, engine.tokenizer) for given, result in made]
    logs = [result["message_log"] for result in results]
    flagged = [one for log in logs for one in log if one.get("is_invalid_tool_call")]
    loss_masks()(logs)
    flat, lengths = batched_message_log_to_flat_message(
        logs, pad_value_dict={"token_ids": engine.tokenizer.pad_token_id}
    )
    lines, wrong = await driven.faults(
        [
            Learned.of(
                flat["token_ids"][at][:length],
                flat["token_loss_mask"][at][:length],
                flat["generation_logprobs"][at][:length],
                results[at]["full_result"]["reward"],
            )
            for at, length in enumerate(lengths.tolist())
        ]
    )
    if kinds != {"message", "function_call"} or flagged:
        wrong.append(f"the output has {sorted(kinds)}, of which {len(flagged)} are invalid calls")
    if sorted(result["task_id"] for _, result in made) != sorted(TASK_IDS * PER_TASK):
        wrong.append("the results are not those of the rows")
    lines.append(
        f"{len(made)} results of NeMo-Gym; NeMo-RL's batch {tuple(flat['token_ids'].shape)}: {', '.join(sorted(flat))}"
    )
    return lines, wrong


async def _failures(client: ServerClient, engine: Engine) -> list[str]:
    """An outgrown context is graded. A failure has no reward: NeMo-Gym writes it beside the results."""
    wrong = []
    engine.room = 300
    ((_, result),) = await collected(client, [row(TASK_IDS[0])])
    if (result["reward"], result["turns"]) != (0.0, 1) or not result["response"]["output"][-1]["generation_token_ids"]:
        wrong.append(f"an outgrown context became {result}")
    engine.room, engine.drifts = sys.maxsize, True
    for task_id, reason in ((TASK_IDS[0], "PROMPT_DIFFERS"), ("pear", "TASK_UNKNOWN")):
        ((_, result),) = await collected(client, [row(task_id)], route_failures_to_sidecar=True)
        if "response" in result or not any(name.startswith("_ng_failure") for name in result):
            wrong.append(f"a failure became {result}")
        status = result["_ng_failure_http_status"]
        if reason not in json.dumps(result) or status != 400 or http_status_is_infra(status):
            wrong.append(f"a failure has not its reason, {reason!r}: {result}")
    return wrong


def loss_masks() -> Any:
    """NeMo-RL's function of this name, without its module, which imports loggers and data sets."""
    text = (Path(nemo_rl.__file__).parent / "algorithms" / "grpo.py").read_text()
    name = "add_grpo_token_loss_masks_and_generation_logprobs"
    (found,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == name)
    found.args.args[0].annotation = None
    scope: dict[str, Any] = {"backfill_missing_routed_experts": lambda _: None, "cast": cast, "torch": torch}
    exec(compile(ast.Module([found], []), "grpo.py", "exec"), scope)
    return scope[name]


def row(task_id: str) -> dict[str, Any]:
    """A row of NeMo-Gym's data, with the sampling that NeMo-RL adds."""
    return {
        "responses_create_params": {"input": [], "temperature": 1.0, "top_p": 1.0, "max_output_tokens": 512},
        "agent_ref": {"type": "responses_api_agents", "name": "penstock_agent"},
        "task_id": task_id,
    }


async def collected(client: ServerClient, rows: list[dict[str, Any]], **options: Any) -> list[tuple[Any, Any]]:
    """What NeMo-Gym's own collection gives for these rows."""

    class Collection(RolloutCollectionHelper):  # type: ignore[misc]
        def setup_server_client(self, head_server_config: Any = None) -> ServerClient:
            return client

    return [await one for one in Collection().run_examples(rows, **options)]


@asynccontextmanager
async def started(engine: Engine, folder: Path) -> AsyncIterator[ServerClient]:
    """The three servers that `gym env start` would start in processes of their own, with the example's settings."""
    runner = web.AppRunner(engine.app())
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    policy = {
        "entrypoint": "app.py",
        "base_url": f"http://{HOST}:{runner.addresses[0][1]}/v1",
        "api_key": "none",
        "model": "policy",
        "return_token_id_information": True,
        "uses_reasoning_parser": True,
    }
    config = OmegaConf.merge(
        OmegaConf.load(FOLDER / "penstock_agent.yaml"),
        {"policy_model": {"responses_api_models": {"vllm_model": policy}}},
    )
    servers = {
        "policy_model": VLLMModel,
        "penstock_agent": example(),
        "penstock_environment": LegacyAgentEnvironmentServer,
    }
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        sockets = {name: socket.create_server((HOST, 0)) for name in servers}
        for name, bound in sockets.items():
            settings(config, name).update({"host": HOST, "port": bound.getsockname()[1]})
        client = ServerClient(head_server_config=BaseServerConfig(host=HOST, port=1), global_config_dict=config)
        for name, kind in servers.items():
            made = kind.model_fields["config"].annotation.model_validate({"name": name, **settings(config, name)})
            await stack.enter_async_context(serving(kind(config=made, server_client=client), sockets[name]))
        yield client


def settings(config: DictConfig, name: str) -> Any:
    """Those of a server."""
    (of_kind,) = config[name].values()
    (found,) = of_kind.values()
    return found


def example() -> Any:
    """The class that the example's file starts."""
    spec = importlib.util.spec_from_file_location("penstock_agent_app", FOLDER / "app.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PenstockAgent


@asynccontextmanager
async def serving(server: Any, bound: socket.socket) -> AsyncIterator[None]:
    """As `run_webserver` does, in this process."""
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    server.setup_cancellation_middleware(app)
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    task = asyncio.create_task(running.serve(sockets=[bound]))
    try:
        yield
    finally:
        running.should_exit = True
        await task
