"""The inference service's settings: which model, which engine, which limits."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from penstock_chassis.auth import DEFAULT_NAMESPACE, is_namespace
from penstock_chassis.membership import members
from penstock_chassis.settings import ServiceSettings
from penstock_inference.engines.base import EngineOptions

WITHOUT_WEIGHTS = frozenset({"none", "openai", "scripted", "sglang"})
"""Engines that load no weight files, from which a restarted replica could recover."""


class InferenceSettings(ServiceSettings):
    """Read from flags, `PENSTOCK_INFERENCE_*` and the table `[inference]`."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_INFERENCE_")

    port: int = Field(7704, ge=0, le=65535, description="port to listen on; 0 lets the kernel choose")
    model_dir: Path = Field(description="directory with config.json, model.safetensors, tokenizer.json, chat template")
    drain_s: float = Field(
        10.0, ge=0, le=86_400, description="seconds that a stop waits for requests, and takes no new ones"
    )
    model_name: str = Field("", description="the model's name for agents; empty = the directory's name")
    engine: str = Field(
        "numpy",
        description="engine: numpy, vllm, sglang, openai, scripted, none (a tokenizer alone, for trainers that answer"
        " themselves), or one that another package registers",
    )
    engine_options: dict[str, str] = Field(
        default_factory=dict, description='options of the engine, a JSON object such as {"script": "turns.yaml"}'
    )
    replicas: int = Field(1, ge=1, le=64, description="engines (replicas) of this service, each in its own process")
    replica_devices: list[str] = Field(
        default_factory=list,
        description='GPUs of each replica, a JSON list such as ["0,1", "2,3"]; unset = this machine\'s in equal parts',
    )
    replica_silence_s: float = Field(
        60.0,
        ge=5,
        le=3600,
        description="seconds without a sign of life after which a replica is killed and restarted",
    )
    tool_call_parser: str | None = Field(
        None,
        description="parser of tool calls and reasoning: hermes, llama3, mistral, qwen3_coder, deepseek, kimi, glm,"
        " harmony, granite, think or none; unset = the template decides",
    )
    max_concurrency: int = Field(64, ge=1, le=4096, description="most concurrent generations, per replica; more wait")
    max_waiting: int = Field(4096, ge=0, description="most waiting generations, per replica; more are refused")
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="most tokens of prompt and completion together; unset = 4096 for numpy, 2**20 for scripted, the "
        "model's for vllm and none",
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="memory for keys and values, in bytes, per replica; unset, numpy and vllm on a CPU take 1 GiB,"
        " vllm on a GPU what gpu_memory_utilization leaves",
    )
    weights_dir: Path | None = Field(
        None, description="directory under which weight pushes may name paths; unset = none"
    )
    adapters_dir: Path | None = Field(
        None, description="directory under which adapters may be named by path; unset = none"
    )
    upstream_api_key: SecretStr | None = Field(
        None, description="key of the endpoint of the engines openai and sglang; sent to its base_url only"
    )
    max_update_bytes: int = Field(512 << 20, ge=1 << 10, description="largest weight push, in bytes")
    pool_members: str = Field(
        "",
        description="the engines that work together, this one included, as the gates' inference_members has them; each "
        "hands weights and adapters on to those that come later, and keeps files of at most two full pushes for that",
    )
    pool_token: SecretStr | None = Field(
        None, description="operator token of the other engines; unset = this service's own"
    )
    pool_ca: Path | None = Field(
        None, description="PEM file with the CA of the other engines; unset = plaintext, on loopback only"
    )
    update_idle_s: float = Field(60.0, gt=0, le=3600, description="seconds of silence after which a push is cancelled")

    weights_namespace: str = Field(
        DEFAULT_NAMESPACE,
        description="namespace whose callers, beside operators, may change the engine for all: push weights, pause,"
        " sleep, and name adapters by path",
    )

    @field_validator("pool_members")
    @classmethod
    def _members_are_valid(cls, value: str) -> str:
        if value:
            members.parse(value)
        return value

    @field_validator("weights_namespace")
    @classmethod
    def _is_a_namespace(cls, value: str) -> str:
        if not is_namespace(value):
            raise ValueError("must be 1 to 63 of a-z, 0-9 and -, the first a letter or digit")
        return value

    @field_validator("replicas")
    @classmethod
    def _replicas_have_weights(cls, value: int, info: ValidationInfo) -> int:
        engine = info.data.get("engine")
        if value > 1 and engine in WITHOUT_WEIGHTS:
            raise ValueError(f"must be 1 with the engine {engine}, which loads no weights")
        return value

    def engine_settings(self, work_dir: Path) -> EngineOptions:
        """The engine's options; `work_dir` exists as long as the engine runs."""
        return EngineOptions(
            model_dir=self.model_dir,
            model_name=self.model_name or self.model_dir.resolve().name,
            max_concurrency=self.max_concurrency,
            max_waiting=self.max_waiting,
            max_context_tokens=self.max_context_tokens,
            kv_cache_bytes=self.kv_cache_bytes,
            work_dir=work_dir,
            upstream_api_key=self.upstream_api_key.get_secret_value() if self.upstream_api_key else None,
            extra=self.engine_options,
        )
