"""NeMo-Gym (0.7.0): an agent server. NeMo-Gym's `/run` runs a rollout, and its model server answers the agent's calls.

responses_api_agents/penstock_agent/app.py, in a folder where `gym env start` is run, is

    from penstock.adapters.trainers.plugins.nemo_gym import PenstockAgent

    if __name__ == "__main__":
        PenstockAgent.run_webserver()

A row of the data set names its task in `task_id`, or in `verifier_metadata["task_id"]`. The model server needs
`return_token_id_information: true`. It takes messages and makes the prompt itself: an answer to another prompt than the
recorded one is refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import HTTPException, Request
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import ModelServerRef
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.responses_converter import ResponsesConverter
from nemo_gym.server_utils import get_response_json, raise_for_status
from pydantic import ConfigDict, Field, PrivateAttr

from penstock.adapters.trainers import nemo_gym
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts, CannotAnswer
from penstock.client.errors import InvalidArgument
from penstock.client.intercept.calls import ModelCall
from penstock.client.types.chat import (
    Completion,
    FinishReason,
    Image,
    LogprobsMode,
    Message,
    Reasoning,
    Role,
    Sampling,
    Text,
    Tool,
    ToolResult,
)


class PenstockAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc]
    """The settings of the server, beside NeMo-Gym's own; they are those of `AgentRollouts.load`."""

    model_server: ModelServerRef
    tasks: str
    agent: str
    connection: str | None = None
    tries: int = 3
    options: dict[str, Any] = Field(default_factory=dict)


class PenstockRunRequest(BaseRunRequest):  # type: ignore[misc]
    """A row of the data set; it may have more fields, which go back with the answer."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class PenstockVerifyResponse(BaseVerifyResponse):  # type: ignore[misc]
    """The row with `response`, `reward`, `penstock_rollout_id`, `turns` and `truncated`."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)


class PenstockAgent(SimpleResponsesAPIAgent):  # type: ignore[misc]
    """A rollout of an agent for each `/run`; Penstock's verifier gives the reward."""

    ray_enabled = False
    config: PenstockAgentConfig
    _rollouts: AgentRollouts = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Reads the tasks, so that a server with a bad one does not start."""
        super().model_post_init(context)
        given = self.config
        rollouts = AgentRollouts.load(
            given.tasks, given.agent, connection=given.connection, tries=given.tries, **given.options
        )
        self._rollouts = replace(rollouts, messages=True)

    async def responses(self, request: Request) -> NeMoGymResponse:
        """Is not served: a conversation without a task has no rollout."""
        raise HTTPException(501, "PenstockAgent serves /run only")

    async def run(self, request: Request, body: PenstockRunRequest) -> PenstockVerifyResponse:
        """Returns the rollout's sequence with most trained tokens, in the output items of the response.

        A failure is no reward of zero, but the answer's status. 400, for NeMo-RL the fault of the row, which it hardly
        tries again: `TASK_UNKNOWN`; `NO_TOKEN_IDS`: the model server returns none; `PROMPT_DIFFERS`: it made another
        prompt; `IMAGES`: an agent shows the model some; `VIEW_TRUNCATED`: a conversation is too large. 500, for NeMo-RL
        a fault of the machines: RolloutFailed, as `AgentRollouts.place`, and all others.
        """
        row_of_data = body.model_extra or {}
        task_id = row_of_data.get("task_id") or (row_of_data.get("verifier_metadata") or {}).get("task_id")
        engine = _ModelServer(self, body)
        try:
            row = await self._rollouts.row(task_id, engine.sample)
        except InvalidArgument as error:
            raise HTTPException(400, f"{error.reason}: {error}") from error
        params = body.responses_create_params.model_dump(mode="json", exclude_unset=True)
        answer = nemo_gym.verify_response(row, params=params, items=engine.items, model=engine.model)
        return PenstockVerifyResponse(**{**row_of_data, **answer})


class _ModelServer:
    """NeMo-Gym's model server, as the calls of one `/run` ask it."""

    def __init__(self, agent: PenstockAgent, body: PenstockRunRequest) -> None:
        self._agent, self._body = agent, body
        self._cookies: Any = None
        self._answered: dict[str, dict[str, Any]] = {}
        self._converter = ResponsesConverter(return_token_id_information=False)
        self.items: dict[str, list[nemo_gym.Item]] = {}
        """The output items of each call's answer, without token ids."""
        self.model = ""

    async def sample(self, call: ModelCall) -> Completion:
        """Asks for a chat completion, and takes its ids if it was made for the call's own prompt."""
        params = self._body.responses_create_params
        limits = [limit for limit in (params.max_output_tokens, call.sampling.max_tokens) if limit is not None]
        asked = {
            "messages": self._messages(call),
            "tools": [_tool(tool) for tool in call.tools] or None,
            "max_tokens": min(limits, default=None),
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        agent = self._agent
        response = await agent.server_client.post(
            server_name=agent.config.model_server.name,
            url_path=agent.url_path_for_run("/v1/chat/completions", self._body),
            json={name: value for name, value in asked.items() if value is not None},
            cookies=self._cookies,
        )
        await raise_for_status(response)
        # They keep a conversation at one engine, for its prefix cache.
        self._cookies = response.cookies or self._cookies
        answer = await get_response_json(response)
        (choice,) = answer["choices"]
        message, is_cut = choice["message"], choice["finish_reason"] == "length"
        ids = message.get("generation_token_ids")
        if not ids and is_cut:
            raise CannotAnswer("The model server: the conversation leaves no room in the context")
        if ids is None:
            raise InvalidArgument("No token ids: set return_token_id_information", reason="NO_TOKEN_IDS")
        _check_prompt(call, message["prompt_token_ids"])
        self._answered[call.call_id] = {name: message[name] for name in _TOKENS}
        self.items[call.call_id] = [
            item.model_dump(mode="json", exclude_none=True)
            for item in self._converter.postprocess_assistant_message_dict(message)
        ]
        self.model = answer.get("model") or self.model
        return Completion.of_tokens(
            ids,
            message["generation_log_probs"],
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            logprobs_mode=LogprobsMode.PROCESSED,
            sampling_used=Sampling(temperature=params.temperature, top_p=params.top_p),
            engine="nemo-gym",
        )

    def _messages(self, call: ModelCall) -> list[dict[str, Any]]:
        """The conversation; its last answer has the ids that were sampled, from which NeMo-RL continues the prompt."""
        if call.view_truncated:
            raise InvalidArgument(f"{call!r}: the conversation is too large to be sent", reason="VIEW_TRUNCATED")
        made = [part for message in call.messages for part in _chat(message)]
        before = self._answered.get(call.parent_call_id or "")
        if before is not None:
            for message in reversed(made):
                if message["role"] == "assistant":
                    message.update(before)
                    break
        return made


_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def _check_prompt(call: ModelCall, ids: Sequence[int]) -> None:
    ours = call.prompt_token_ids.tolist()
    if list(ids) == ours:
        return
    place = next(
        (at for at, pair in enumerate(zip(ids, ours, strict=False)) if pair[0] != pair[1]), min(len(ids), len(ours))
    )
    raise InvalidArgument(
        f"The model server answered another prompt than that of {call!r}: they differ from token {place} on, of "
        f"{len(ids)} and {len(ours)}. Both need one chat template, and the engine NeMo-RL's continuation of prompts",
        reason="PROMPT_DIFFERS",
    )


def _chat(message: Message) -> list[dict[str, Any]]:
    """A message as chat completions have it; each result of a tool is one of its own."""
    parts = [inner for part in message.parts for inner in (part.parts if isinstance(part, ToolResult) else (part,))]
    if any(isinstance(part, Image) for part in parts):
        raise InvalidArgument("An agent shows the model an image, which this plug-in does not send", reason="IMAGES")
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if results:
        return [{"role": "tool", "tool_call_id": one.tool_call_id, "content": _text(one.parts)} for one in results]
    made: dict[str, Any] = {"role": str(message.role.value), "content": message.text}
    if message.role is Role.ASSISTANT:
        thoughts = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
        if thoughts:
            made["reasoning_content"] = thoughts
        if message.tool_calls:
            made["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments_json}}
                for one in message.tool_calls
            ]
    return [made]


def _text(parts: Sequence[Any]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def _tool(tool: Tool) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json_schema:
        function["parameters"] = json.loads(tool.parameters_json_schema)
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
