"""An SGLang server at the wire of version 0.5.23: strict about what it is sent, exact about which weights sampled what.

It refuses what the real one refuses, and unknown fields of `/generate` too, which the real one ignores: a misspelt one
would have no effect. It computes nothing: a token's distribution is a formula of the weights' one number and the
token's position. With `held`, tokens come one by one, as the test permits them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.numpy import load_file
from tests.support.endpoints.loopback import event_stream, send_event, serving

VOCAB = 40
STOP = 2
CONTEXT = 256
NAMES = frozenset({"embed.weight", "head.weight"})
MASK_TOKENS = 8
"""Its --sampling-mask-max-tokens."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Params(_Body):
    """The fields of sampling_params, with the ranges of SamplingParams.verify."""

    max_new_tokens: int = Field(128, ge=0)
    min_new_tokens: int = Field(0, ge=0)
    stop: str | list[str] | None = Field(None, max_length=32)
    stop_token_ids: list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    n: int = Field(1, ge=1, le=1)
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = Field(None, ge=1)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class Generate(_Body):
    """The fields of GenerateReqInput that are used here."""

    rid: str
    text: str | None = None
    input_ids: list[int] | None = Field(None, min_length=1)
    sampling_params: Params
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = Field(0, ge=0)
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool = False
    return_prompt_token_ids: bool = False
    cache_salt: str | None = None
    lora_path: str | None = None


class Pause(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(_Body):
    torch_empty_cache: bool = True


class Update(_Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class Name(_Body):
    new_version: str
    abort_all_requests: bool = True


class Abort(_Body):
    rid: str = ""
    abort_all: bool = False


class Load(_Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class Unload(_Body):
    lora_name: str


@dataclass
class Sequence:
    """A request in the scheduler."""

    body: Generate
    weights: list[int] = field(default_factory=list)
    """The number of the weights that sampled each token: the truth."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[Any]] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    """Logprobs of what the filters leave."""
    changes: list[tuple[str, int]] = field(default_factory=list)
    """The name of the weights before each change, and the number of tokens then."""
    finish: dict[str, Any] | None = None
    retractions: int = 0
    echoed: bool = False
    """It was aborted while it waited, in which case less is reported."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.finish is not None


Fault = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class SglangServer:
    """What it was started with, and its state."""

    incremental: bool = False
    spans: bool = True
    key: str = ""
    original_logprobs: bool = False
    """SGLANG_RETURN_ORIGINAL_LOGPROB."""
    masks: bool = True
    lora: bool = True
    deterministic: bool = False
    held: bool = False
    script: dict[int, int] = field(default_factory=dict)
    """Tokens by position; elsewhere the likeliest."""
    tokens_of_text: Callable[[str], list[int]] | None = None
    fault: Fault | None = None
    """Answers streams of `/generate` instead."""
    weight_version: str = "default"
    model_path: str = "/models/base"
    number: int = 0
    """The weights' one number; -1: broken."""
    refuse_paths: set[str] = field(default_factory=set)
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of streams."""
    headers: list[dict[str, str]] = field(default_factory=list)
    commands: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sequences: dict[str, Sequence] = field(default_factory=dict)
    """Those in flight, by name."""
    ended: list[Sequence] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    paused: str = ""
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closes its connection before the answer has ended."""

    # The model -------------------------------------------------------------------------------------------------------

    def table(self, number: int, position: int, temperature: float = 1.0) -> dict[int, float]:
        """Logprobs by token of the weights `number` at a position of the completion, or of the prompt."""
        logits = [-0.5 * ((7 * (token + 3 * number + 5 * position)) % VOCAB) / temperature for token in range(VOCAB)]
        whole = math.log(sum(math.exp(value) for value in logits))
        return {token: value - whole for token, value in enumerate(logits)}

    def filtered(self, table: dict[int, float], params: Params) -> dict[int, float]:
        """What top_k, top_p and min_p leave of it, renormalised."""
        ranked = sorted(table, key=lambda token: -table[token])
        left, mass = [], 0.0
        for token in ranked[: params.top_k if params.top_k > 0 else None]:
            if mass < params.top_p and math.exp(table[token] - table[ranked[0]]) >= params.min_p:
                left.append(token)
                mass += math.exp(table[token])
        return {token: table[token] - math.log(mass) for token in left}

    def _sample(self, sequence: Sequence, number: int) -> None:
        params, n = sequence.body.sampling_params, len(sequence.ids)
        heat = params.temperature or 1.0
        warm = self.table(number, n, heat)
        shown = self.table(number, n) if self.original_logprobs else warm
        token = self.script.get(n, max(warm, key=lambda token: warm[token]))
        sequence.ids.append(token)
        sequence.weights.append(number)
        sequence.logprobs.append(shown[token])
        ranked = sorted(shown, key=lambda token: -shown[token])
        sequence.top.append([[shown[t], t, None] for t in ranked[: sequence.body.top_logprobs_num]])
        sequence.kept.append(self.filtered(warm, params).get(token, -math.inf))
        if not params.ignore_eos and token in {STOP, *(params.stop_token_ids or ())}:
            sequence.finish = {"type": "stop", "matched": token}
        elif len(sequence.ids) >= params.max_new_tokens:
            sequence.finish = {"type": "length", "length": params.max_new_tokens}

    # The wire --------------------------------------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.method == "GET":
            return self._get(request.path)
        text = await request.text()
        raw = json.loads(text) if text else {}
        if not isinstance(raw, dict):
            return _refusal("Input should be a valid dictionary")
        route = getattr(self, f"_post{request.path.replace('/', '_')}", None)
        if route is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            answer: web.StreamResponse = await route(request, raw)
        except ValidationError as error:
            found = error.errors()[0]
            where = ".".join(map(str, found["loc"]))
            return _refusal(f"{where}: {found['msg']}")
        return answer

    def _get(self, path: str) -> web.Response:
        info: dict[str, Any]
        match path:
            case "/model_info":
                info = {"model_path": self.model_path, "is_generation": True, "weight_version": self.weight_version}
            case "/server_info":
                info = {
                    "version": "0.5.23",
                    "skip_tokenizer_init": False,
                    "grammar_backend": "xgrammar",
                    "enable_lora": self.lora,
                    "max_lora_rank": 16,
                    "enable_deterministic_inference": self.deterministic,
                    "sampling_mask_max_tokens": MASK_TOKENS,
                    "incremental_streaming_output": self.incremental,
                }
            case "/v1/models":
                info = {"object": "list", "data": [{"id": "served", "max_model_len": CONTEXT}]}
            case "/health":
                return web.Response(status=200)
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(info)

    async def _post_generate(self, request: web.Request, raw: dict[str, Any]) -> web.StreamResponse:
        if raw.get("stream"):
            self.bodies.append(raw)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            if self.fault is not None:
                return await self.fault(request, raw)
        body = Generate.model_validate(raw)
        try:
            self._check(body)
        except ValueError as error:
            if not body.stream:
                return web.json_response({"error": {"message": str(error)}}, status=400)
            response = await event_stream(request)
            problem = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            await send_event(response, {"error": problem})
            await response.write(b"data: [DONE]\n\n")
            return response
        sequence = Sequence(body)
        self.sequences[body.rid] = sequence
        try:
            return await self._answer(request, sequence)
        finally:
            self.sequences.pop(body.rid, None)
            self.ended.append(sequence)
            async with self.moved:
                self.moved.notify_all()

    def _check(self, body: Generate) -> None:
        """What the tokenizer manager and the scheduler check; the messages are its own."""
        params = body.sampling_params
        if (body.text is None) == (body.input_ids is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if body.rid in self.sequences:
            raise ValueError(f"Duplicate request ID detected: {body.rid}")
        if body.input_ids is not None and len(body.input_ids) + params.max_new_tokens > CONTEXT:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        if params.top_k == 0 or params.top_k < -1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
        if params.min_new_tokens > params.max_new_tokens:
            raise ValueError("min_new_tokens must be in [0, max_new_tokens]")
        if sum(form is not None for form in (params.json_schema, params.regex, params.ebnf)) > 1:
            raise ValueError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
        if body.lora_path and not self.lora:
            raise ValueError(f"LoRA adapter '{body.lora_path}' was requested, but LoRA is not enabled.")
        if body.lora_path and body.lora_path not in self.adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {body.lora_path}")

    async def _answer(self, request: web.Request, sequence: Sequence) -> web.StreamResponse:
        body = sequence.body
        params = body.sampling_params
        mask = f"return_sampling_mask requires top_k=1 or 1 < top_k <= {MASK_TOKENS}"
        if body.return_sampling_mask and not (self.masks and 1 <= params.top_k <= MASK_TOKENS):
            sequence.finish = _given_up(mask)
        elif params.regex == "(":
            sequence.finish = _given_up("Failed to compile regex grammar: missing )")
        response = await event_stream(request) if body.stream else None
        sent = 0
        if params.max_new_tokens == 0:
            sequence.finish = {"type": "length", "length": 0}
        while sequence.finish is None:
            if self.held and body.stream:
                await self.permits.acquire()
            async with self.moved:
                await self.moved.wait_for(lambda: not self.paused or sequence.finish is not None)
            if not sequence.over:
                self._sample(sequence, self.number)
            due = len(sequence.ids) == 1 or len(sequence.ids) - sent >= (params.stream_interval or 1)
            if response is not None and due and not sequence.over:
                await send_event(response, self._event(sequence, sent))
                sent = len(sequence.ids)
            await asyncio.sleep(0)
        if response is None:
            status = sequence.finish.get("status_code")
            if status is not None:
                return web.json_response({"error": {"message": sequence.finish["message"]}}, status=status)
            return web.json_response(self._event(sequence, 0))
        await send_event(response, self._event(sequence, sent))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, sequence: Sequence, sent: int) -> dict[str, Any]:
        body, total = sequence.body, len(sequence.ids)
        cut = slice(sent if self.incremental and body.stream else 0, None)
        ids = sequence.ids[cut]
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": sequence.finish,
            "weight_version": self.weight_version,
            "completion_tokens": total,
        }
        if sequence.echoed:
            ids = sequence.ids[-1:] if self.incremental else sequence.ids
        else:
            meta |= {"prompt_tokens": len(body.input_ids or [0]), "cached_tokens": 1}
            meta |= {"num_retractions": sequence.retractions, "reasoning_tokens": 0}
        if body.return_logprob:
            cut = slice(0, None) if sequence.echoed else cut
            rows = [[value, token, None] for value, token in zip(sequence.logprobs, sequence.ids, strict=True)]
            meta["output_token_logprobs"] = rows[cut]
            meta["output_token_logprobs_length"] = total
            meta["input_token_logprobs"] = self._prompt_rows(body)
            if body.top_logprobs_num:
                meta["output_top_logprobs"] = sequence.top[cut]
                meta["input_top_logprobs"] = self._prompt_tables(body)
        if body.return_sampling_mask:
            meta["output_token_sampling_logprobs"] = sequence.kept[cut]
        if sequence.finish is not None and self.spans:
            meta["weight_versions"] = self._spans(sequence)
        answer: dict[str, Any] = {"text": "x" * total, "output_ids": ids, "meta_info": meta}
        if body.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.tokens_of_text(body.text or "") if self.tokens_of_text else [0]
        return answer

    def _spans(self, sequence: Sequence) -> list[dict[str, Any]]:
        """As `compute_weight_version_spans` does it."""
        spans: list[dict[str, Any]] = []
        for version, end in [*sequence.changes, (self.weight_version, len(sequence.ids))]:
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and version == spans[-1]["version"]:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans

    def _prompt_rows(self, body: Generate) -> list[Any]:
        if body.logprob_start_len < 0 or body.input_ids is None:
            return []
        later = [[self.table(self.number, n)[t], t, None] for n, t in enumerate(body.input_ids)][1:]
        return [[None, body.input_ids[0], None], *later]

    def _prompt_tables(self, body: Generate) -> list[Any]:
        if body.logprob_start_len < 0 or body.input_ids is None:
            return []
        tables = [self.table(self.number, n) for n in range(len(body.input_ids))]
        ranked = [sorted(table, key=lambda t: -table[t])[: body.top_logprobs_num] for table in tables]
        rows = [[[table[t], t, None] for t in best] for table, best in zip(tables, ranked, strict=True)]
        return [None, *rows[1:]]

    async def _post_pause_generation(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("pause_generation", Pause, raw)
        async with self.moved:
            self.paused = wanted.mode
            for sequence in self.sequences.values():
                if wanted.mode == "abort":
                    sequence.finish = sequence.finish or _aborted()
                elif wanted.mode == "retract" and sequence.ids:
                    sequence.retractions += 1
            self.moved.notify_all()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _post_continue_generation(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        self._command("continue_generation", Continue, raw)
        async with self.moved:
            self.paused = ""
            self.moved.notify_all()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _post_update_weights_from_disk(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("update_weights_from_disk", Update, raw)
        if not self.paused:
            async with self.moved:
                await self.moved.wait_for(lambda: not self.sequences)
        try:
            number = self._read(wanted.model_path)
        except (OSError, ValueError) as error:
            self.number = -1
            text = f"Failed to update weights: {error}.\nRolling back to original weights."
            return _done(False, text, num_paused_requests=0)
        # What the scheduler has not taken out of its batch has a token under way, of the weights before.
        for sequence in self.sequences.values():
            if self.paused == "in_place" and sequence.ids:
                self._sample(sequence, self.number)
        self.model_path, self.number = wanted.model_path, number
        if wanted.weight_version is not None:
            overlap = 1 if self.paused == "in_place" else 0
            self._rename(wanted.weight_version, overlap)
        if wanted.flush_cache and self.sequences and self.paused != "retract":
            return _done(False, "Weights were updated, but the cache was not flushed", num_paused_requests=0)
        return _done(True, "Succeeded to update model weights.", num_paused_requests=0)

    def _read(self, model_path: str) -> int:
        if model_path in self.refuse_paths:
            raise ValueError("shape mismatch")
        if not Path(model_path).is_dir():
            return 0  # the weights that it started with
        tensors: dict[str, Any] = {}
        for file in sorted(Path(model_path).glob("*.safetensors")):
            found = load_file(file)
            if again := found.keys() & tensors.keys():
                raise ValueError(f"{sorted(again)[0]} is in two files")
            tensors |= found
        if tensors.keys() != NAMES:
            raise ValueError(f"tensors {sorted(tensors)}")
        return int(tensors["head.weight"][0])

    def _rename(self, version: str, overlap: int = 0) -> None:
        if version == self.weight_version:
            return
        for sequence in self.sequences.values():
            if sequence.ids:
                sequence.changes.append((self.weight_version, len(sequence.ids) - overlap))
        self.weight_version = version

    async def _post_update_weight_version(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("update_weight_version", Name, raw)
        self._rename(wanted.new_version)
        return _done(True, f"Weight version updated to {wanted.new_version}", new_version=wanted.new_version)

    async def _post_flush_cache(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        self.commands.append(("flush_cache", raw))
        busy = self.sequences and self.paused != "retract"
        return web.Response(text="Flush cache failed.\n" if busy else "Cache flushed.\n", status=400 if busy else 200)

    async def _post_abort_request(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("abort_request", Abort, raw)
        async with self.moved:
            for name, sequence in self.sequences.items():
                if wanted.abort_all or (wanted.rid and name.startswith(wanted.rid)):
                    sequence.echoed = self.paused == "retract"
                    text = {"type": "abort", "message": "Abort in waiting queue"}
                    sequence.finish = sequence.finish or (text if sequence.echoed else _aborted())
                    if self.held:
                        self.permits.release()
            self.moved.notify_all()
        return web.Response(status=200)

    async def _post_load_lora_adapter(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("load_lora_adapter", Load, raw)
        problem = ""
        if not self.lora:
            problem = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        elif wanted.lora_name in self.adapters:
            problem = f"LoRA adapter '{wanted.lora_name}' is already loaded"
        elif not (Path(wanted.lora_path) / "adapter_model.safetensors").is_file():
            problem = f"Can't find adapter weights at {wanted.lora_path}"
        else:
            self.adapters[wanted.lora_name] = wanted.lora_path
        answer = {"success": not problem, "error_message": problem or None, "loaded_adapters": self.adapters}
        return web.json_response(answer, status=400 if problem else 200)

    async def _post_unload_lora_adapter(self, request: web.Request, raw: dict[str, Any]) -> web.Response:
        wanted = self._command("unload_lora_adapter", Unload, raw)
        async with self.moved:
            await self.moved.wait_for(
                lambda: all(sequence.body.lora_path != wanted.lora_name for sequence in self.sequences.values())
            )
        self.adapters.pop(wanted.lora_name, None)
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": self.adapters})

    def _command(self, name: str, form: type[Any], raw: dict[str, Any]) -> Any:
        self.commands.append((name, raw))
        return form.model_validate(raw)

    def permit(self, tokens: int) -> None:
        """Let so many tokens be sampled, of all requests together."""
        for _ in range(tokens):
            self.permits.release()


def _aborted() -> dict[str, Any]:
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _given_up(message: str) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}


def _refusal(message: str) -> web.Response:
    body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    return web.json_response(body, status=400)


def _done(success: bool, message: str, **more: Any) -> web.Response:
    return web.json_response({"success": success, "message": message} | more, status=200 if success else 400)


@asynccontextmanager
async def sglang_server(port: int = 0, **options: Any) -> AsyncIterator[SglangServer]:
    """The server on the loopback."""
    here = SglangServer(**options)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await here.serve(request)
        except (ConnectionError, asyncio.CancelledError):
            here.left.set()
            raise

    app = web.Application(client_max_size=32 << 20)
    app.router.add_route("*", "/{path:.*}", handle)
    async with serving(app, port, cancels=True) as url:
        here.base_url = url
        yield here
