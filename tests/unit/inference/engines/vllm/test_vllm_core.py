"""When vLLM stands still, sleeps, and goes on, whatever comes in between; vLLM itself is a stand-in."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from tests.support.vision import png
from tests.support.waiting import GUARD_S, eventually

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unsupported
from penstock_inference.engines.base import (
    Done,
    EngineOptions,
    GenerateRequest,
    Media,
    PauseMode,
    Sampling,
    UpdateFormat,
)
from penstock_inference.engines.checks import closed
from penstock_inference.engines.optional_features import AdapterSource

HOUSE = "penstock_inference.engines.vllm"
OURS = ("adapters", "features", "runtime", "core", "params", "generation", "updates", "engine")
THEIRS = (
    *("vllm", "vllm.envs", "vllm.engine", "vllm.engine.arg_utils", "vllm.outputs", "vllm.platforms", "vllm.v1"),
    *("vllm.v1.engine", "vllm.v1.engine.async_llm", "vllm.v1.metrics", "vllm.v1.metrics.loggers", "vllm.lora"),
    *("vllm.lora.request", "vllm.sampling_params", "vllm.inputs", "vllm.inputs.engine"),
)


class EngineDeadError(Exception):
    """As vLLM's."""


class VLLMClientError(Exception):
    """As vLLM's."""


class Llm:
    """A vLLM that stops, goes on and sleeps when the test lets it."""

    def __init__(self) -> None:
        self.errored = False
        self.stands = False
        self.asleep = 0
        self.slept_with: list[int] = []
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.running = 0

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.asked.set()
        self.stands = True
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure

    async def resume_generation(self) -> None:
        self.stands = False

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)
        self.slept_with.append(self.running)
        self.asleep = level

    async def wake_up(self) -> None:
        await asyncio.sleep(0)
        self.asleep = 0

    async def collective_rpc(self, name: str, args: object) -> None:
        return None

    def shutdown(self, *_: object) -> None:
        return None


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine's modules, imported without vLLM; they do not stay imported."""
    for name in THEIRS:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name, error in (("vllm.v1.engine.exceptions", EngineDeadError), ("vllm.exceptions", VLLMClientError)):
        module = ModuleType(name)
        setattr(module, error.__name__, error)
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"{HOUSE}.{name}", raising=False)
    yield SimpleNamespace(
        **{name: importlib.import_module(f"{HOUSE}.{name}") for name in ("runtime", "core", "engine", "generation")}
    )
    for name in OURS:
        sys.modules.pop(f"{HOUSE}.{name}", None)


@pytest.fixture
def lives(house: Any, monkeypatch: pytest.MonkeyPatch) -> list[Llm]:
    """The vLLMs that the core starts, oldest first."""
    started: list[Llm] = []

    async def start(*_: object) -> Any:
        started.append(Llm())
        return house.runtime.Runtime(started[-1], house.runtime.Gauges())

    monkeypatch.setattr(house.core.Runtime, "start", start)
    return started


@pytest.fixture
async def core(house: Any, lives: list[Llm]) -> Any:
    features = SimpleNamespace(weight_version=False)
    chosen = SimpleNamespace(
        max_adapters=0, max_adapters_per_namespace=None, max_adapter_rank=8, transfer_backend="", sleep=True
    )
    house.core.engine_arguments = lambda *_: {}
    core = house.core.Core(EngineOptions(Path(), "m"), chosen, features, MagicMock(), MagicMock())
    await core.start()
    yield core
    await core.aclose(closed)


def engine_of(house: Any, core: Any) -> Any:
    return house.engine.VllmEngine(core, MagicMock(), MagicMock(), SimpleNamespace(cleanup=lambda: None))


def request() -> GenerateRequest:
    return GenerateRequest("r", np.ones(1, np.int32), Sampling(max_tokens=1))


class Generating:
    """A generation that runs until it is ended."""

    def __init__(self, core: Any, llm: Llm) -> None:
        self._core, self._llm = core, llm

    async def begin(self) -> None:
        async with asyncio.timeout(GUARD_S):
            assert await self._core.admission.enter(request())
        self._llm.running += 1

    def end(self) -> None:
        self._llm.running -= 1
        self._core.admission.leave()


def adapter_source(directory: Path, version: int, **given: Any) -> AdapterSource:
    """An adapter's files, which say their version."""
    (files := directory / f"sent-{version}").mkdir()
    (files / "adapter_config.json").write_text('{"r": 1}')
    (files / "adapter_model.safetensors").write_text(str(version))
    return AdapterSource("style", version, files, **given)


def adapting(generations: Any, name: str, adapter: str = "style", **wanted: Any) -> asyncio.Task[list[int]]:
    """A completion by an adapter; the result is its versions."""

    async def complete() -> list[int]:
        request = GenerateRequest(name, TWO, Sampling(max_tokens=2), adapter=adapter, **wanted)
        done = [event async for event in generations.generate(request)][-1]
        assert isinstance(done, Done)
        return [span.policy_version for span in done.version_spans]

    return asyncio.create_task(complete())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.requirement("R49", "R130")
async def test_an_update_cancelled_while_vllm_stops_lets_it_continue(core: Any, lives: list[Llm]) -> None:
    """A transfer's caller may leave at that moment; vLLM stood still for ever, and so did every generation."""
    (llm,) = lives
    llm.go_on.clear()

    async def update() -> None:
        async with core.stopped(PauseMode.KEEP):
            raise AssertionError

    updating = asyncio.create_task(update())
    await llm.asked.wait()
    updating.cancel()
    await turns()
    llm.go_on.set()
    await asyncio.gather(updating, return_exceptions=True)
    stood = [llm.stands]
    for change in (core.freeze, core.thaw):
        await change("pause")
        stood.append(llm.stands)
    assert stood == [False, True, False]


@pytest.mark.requirement("R49", "R130")
async def test_a_vllm_that_dies_while_stopping_runs_after_its_restart(core: Any, lives: list[Llm]) -> None:
    """The reason to stop ends with the update, also where it failed."""
    lives[0].failure = EngineDeadError()
    with pytest.raises(PenstockError):
        async with core.stopped(PauseMode.KEEP):
            raise AssertionError
    await eventually(lambda: len(lives) == 2, "it starts again")
    await Generating(core, lives[1]).begin()
    assert not lives[1].stands


@pytest.mark.requirement("R130")
async def test_two_concurrent_sleeps_need_one_wake(house: Any, core: Any, lives: list[Llm]) -> None:
    engine = engine_of(house, core)
    generating = Generating(core, lives[0])
    await generating.begin()
    both = [asyncio.create_task(engine.sleep(1)) for _ in range(2)]
    await turns()
    generating.end()
    await asyncio.gather(*both)
    assert lives[0].slept_with == [0]
    await engine.wake()
    await Generating(core, lives[0]).begin()


@pytest.mark.requirement("R130")
async def test_two_concurrent_wakes_release_no_pause(house: Any, core: Any) -> None:
    engine = engine_of(house, core)
    await engine.sleep(1)
    await engine.pause(PauseMode.KEEP)
    await asyncio.gather(engine.wake(), engine.wake())
    entering = asyncio.create_task(core.admission.enter(request()))
    await turns()
    assert not entering.done()
    await engine.resume()
    assert await entering


@pytest.mark.requirement("R130")
@pytest.mark.parametrize("resumed", [False, True])
async def test_an_engine_does_not_sleep_over_generations_that_a_pause_froze(
    house: Any, core: Any, lives: list[Llm], resumed: bool
) -> None:
    """Their caches would be lost, and they would go on with others' memory."""
    engine = engine_of(house, core)
    generating = Generating(core, lives[0])
    await generating.begin()
    sleeping = asyncio.create_task(engine.sleep(1))
    await turns()
    await engine.pause(PauseMode.KEEP)
    if resumed:
        await engine.resume()
    await turns()
    assert not lives[0].slept_with
    if not resumed:
        with pytest.raises(FailedPrecondition):
            await sleeping
    generating.end()
    await asyncio.gather(sleeping, return_exceptions=True)
    assert lives[0].slept_with == ([0] if resumed else [])


@pytest.mark.requirement("R87")
async def test_an_update_waiting_for_generations_still_waits_after_a_resume(
    house: Any, core: Any, lives: list[Llm]
) -> None:
    """With WAIT no completion has two versions, whoever paused and resumed meanwhile."""
    engine = engine_of(house, core)
    generating = Generating(core, lives[0])
    await generating.begin()
    found: list[int] = []

    async def update() -> None:
        async with core.stopped(PauseMode.WAIT):
            found.append(lives[0].running)

    updating = asyncio.create_task(update())
    await turns()
    pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await turns()
    await engine.resume()
    await pausing
    await turns()
    assert not found
    generating.end()
    await updating
    assert found == [0]


@pytest.mark.requirement("R22", "R130")
async def test_a_pause_that_waits_does_not_wait_for_what_another_froze(house: Any, core: Any, lives: list[Llm]) -> None:
    """It waited for the resume, after which it reported an engine that runs as paused."""
    engine = engine_of(house, core)
    generating = Generating(core, lives[0])
    await generating.begin()
    await engine.pause(PauseMode.KEEP)
    async with asyncio.timeout(GUARD_S):
        await engine.pause(PauseMode.WAIT)
    assert lives[0].stands
    await engine.resume()
    generating.end()


@pytest.mark.requirement("R22", "R130")
async def test_a_pause_waits_for_generations_until_it_is_resumed(house: Any, core: Any, lives: list[Llm]) -> None:
    """Not only until another wait for them has ended."""
    engine = engine_of(house, core)
    generating = Generating(core, lives[0])
    await generating.begin()
    pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await turns()
    core.admission.wake_idle()
    await turns()
    assert not pausing.done()
    await engine.resume()
    await pausing
    generating.end()


@pytest.mark.requirement("R49", "R130")
async def test_a_resume_during_a_restart_of_vllm_lets_it_continue(
    house: Any, core: Any, lives: list[Llm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died in a pause; the one that takes its place must not stand still for a pause that has ended."""
    engine, asked, go_on = engine_of(house, core), asyncio.Event(), asyncio.Event()
    await engine.pause(PauseMode.KEEP)
    pauses = Llm.pause_generation

    async def slowly(llm: Llm, mode: str, clear_cache: bool) -> None:
        asked.set()
        await go_on.wait()
        await pauses(llm, mode, clear_cache)

    monkeypatch.setattr(Llm, "pause_generation", slowly)
    core.runtime.kill()
    await asked.wait()
    await engine.resume()
    go_on.set()
    await Generating(core, lives[0]).begin()
    assert not lives[1].stands


@pytest.mark.requirement("R49", "R130")
@pytest.mark.parametrize("step", ["sleep", "wake_up", "resume_generation"])
async def test_an_engine_stays_usable_when_a_caller_leaves_during_a_step(
    house: Any, core: Any, lives: list[Llm], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """vLLM does what it was asked, and nobody forgets it: the engine then wakes and takes requests."""
    engine, asked, go_on = engine_of(house, core), asyncio.Event(), asyncio.Event()
    steps = {"sleep": lambda: engine.sleep(1), "wake_up": engine.wake, "resume_generation": engine.resume}
    if step == "wake_up":
        await engine.sleep(1)
    if step == "resume_generation":
        await engine.pause(PauseMode.KEEP)
    known = getattr(Llm, step)

    async def elsewhere(llm: Llm, *given: Any) -> None:
        await go_on.wait()
        await known(llm, *given)

    async def slowly(llm: Llm, *given: Any) -> None:
        work = asyncio.ensure_future(elsewhere(llm, *given))  # in a process of its own, which hears of no cancellation
        asked.set()
        await asyncio.shield(work)

    monkeypatch.setattr(Llm, step, slowly)
    leaving = asyncio.create_task(steps[step]())
    await asked.wait()
    leaving.cancel()
    await turns()
    go_on.set()
    await asyncio.gather(leaving, return_exceptions=True)
    await turns()
    await engine.wake()
    await engine.resume()
    await Generating(core, lives[0]).begin()
    assert not lives[0].stands and not lives[0].asleep


class OneScoreAStep(Llm):
    """A vLLM that dies of a score beside another request, as its build for CPUs with adapters does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: dict[str, asyncio.Event] = {}
        """Its requests, and when each ends."""
        self.most = 0
        self.sampled: list[int] = []
        """The tokens of every completion."""

    async def add_request(self, name: str, *_: object, lora_request: object) -> Any:
        self.inside[name] = asyncio.Event()
        self.most = max(self.most, len(self.inside))

        async def get() -> Any:
            await self.inside[name].wait()
            del self.inside[name]
            flat = SimpleNamespace(logprobs=[-1.0] * 2, token_ids=[1] * 2, ranks=[1] * 2, start_indices=[0, 1])
            completion = SimpleNamespace(
                token_ids=self.sampled, logprobs=flat, finish_reason="length", stop_reason=None
            )
            return SimpleNamespace(prompt_logprobs=flat, num_cached_tokens=0, outputs=[completion], metrics=None)

        if any(each.startswith("score-") for each in self.inside) and len(self.inside) > 1:
            raise EngineDeadError
        return SimpleNamespace(get=get, get_nowait=lambda: None)

    async def abort(self, name: str) -> None:
        self.inside.pop(name, None)

    def end(self) -> None:
        """End what is inside."""
        for ended in self.inside.values():
            ended.set()


@pytest.fixture
def generations(house: Any, core: Any, lives: list[Llm], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Generations with an adapter's place on a vLLM for CPUs."""
    monkeypatch.setattr(core.adapters, "limit", 1)
    core.features.scores_alone_with_adapters = True
    core.features.version_spans = False
    monkeypatch.setattr(house.generation, "score_params", lambda top: SimpleNamespace(prompt_logprobs=top))
    core.runtime.llm = OneScoreAStep()
    return house.generation.Generations(core, 10, 10, (), None)


def completing(generations: Any, name: str) -> asyncio.Task[list[Any]]:
    async def complete() -> list[Any]:
        return [event async for event in generations.generate(GenerateRequest(name, TWO, Sampling(max_tokens=1)))]

    return asyncio.create_task(complete())


TWO = np.ones(2, np.int32)


@pytest.mark.requirement("R49", "R132")
async def test_a_score_is_alone_in_a_vllm_that_dies_of_company(core: Any, generations: Any) -> None:
    """A client could end the engine's process, with all that ran in it."""
    llm = core.runtime.llm
    first = [completing(generations, f"first-{n}") for n in range(2)]
    await turns()
    scores = [asyncio.create_task(generations.score(TWO, 1.0, "", 0)) for _ in range(2)]
    await turns()
    later = [completing(generations, f"later-{n}") for n in range(2)]
    steps = []
    while not all(task.done() for task in (*first, *scores, *later)):
        await turns()
        steps.append(sorted(name.split("-")[0] for name in llm.inside))
        llm.end()
        await turns()
    assert steps == [["first"] * 2, ["score"], ["score"], ["later"] * 2]
    assert [(await score).logprobs.tolist() for score in scores] == [[-1.0]] * 2
    for ended in await asyncio.gather(*first, *later):
        assert isinstance(ended[-1], Done)


@pytest.mark.requirement("R23", "R132")
async def test_a_score_whose_caller_left_is_out_of_vllm_before_another_request_comes(
    core: Any, generations: Any
) -> None:
    llm = core.runtime.llm
    score = asyncio.create_task(generations.score(TWO, 1.0, "", 0))
    await turns()
    waiting = completing(generations, "waiting")
    await turns()
    score.cancel()
    await turns()
    assert list(llm.inside) == ["waiting"]
    llm.end()
    assert isinstance((await waiting)[-1], Done)


@pytest.mark.requirement("R132")
async def test_a_reader_that_does_not_read_its_completion_delays_no_score(core: Any, generations: Any) -> None:
    llm = core.runtime.llm
    request = GenerateRequest("unread", TWO, Sampling(max_tokens=1), stream=True)
    events = generations.generate(request)
    reading = asyncio.create_task(anext(events))
    await turns()
    llm.end()
    await reading  # and not the rest
    score = asyncio.create_task(generations.score(TWO, 1.0, "", 0))
    await turns()
    llm.end()
    assert (await score).logprobs.tolist() == [-1.0]
    assert core.admission.running == 1
    await events.aclose()
    assert core.admission.running == 0


@pytest.mark.requirement("R87")
async def test_weights_that_come_before_the_first_token_fail_a_request_for_exact_ones(
    core: Any, generations: Any
) -> None:
    """It had been admitted under the weights that it requires."""
    llm = core.runtime.llm

    async def complete() -> list[Any]:
        wanted = GenerateRequest("exact", TWO, Sampling(max_tokens=2), exact_policy_version=0)
        return [event async for event in generations.generate(wanted)]

    completing = asyncio.create_task(complete())
    await turns()
    assert list(llm.inside) == ["exact"]
    llm.sampled = [1, 1]
    await core.put_in_force(1, "", None)
    llm.end()
    with pytest.raises(FailedPrecondition) as caught:
        await completing
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert (core.admission.running, core.counts.failed, core.counts.finished) == (0, 1, 0)


@pytest.mark.requirement("R63", "R87")
@pytest.mark.parametrize(
    ("platform", "name", "refused"),
    [
        ("cpu", "model.layers.0.mlp.experts.0.up_proj.weight", True),
        ("cpu", "model.layers.0.mlp.up_proj.weight", False),
        ("cuda", "model.layers.0.mlp.experts.0.up_proj.weight", False),
    ],
)
async def test_experts_are_not_replaced_where_their_layout_would_be_lost(
    house: Any, core: Any, platform: str, name: str, refused: bool
) -> None:
    """vLLM 0.32.0 for CPUs computed logprobs of no policy after a push, without an error."""
    core.features.platform = platform
    core.checkpoint = SimpleNamespace(sources={name: Path("model.safetensors")})
    updates = house.engine.Updates(core)
    if refused:
        with pytest.raises(Unsupported) as caught:
            await updates.begin(1, "", UpdateFormat.FULL)
        assert caught.value.reason == "CAPABILITY_MISSING"
    else:
        await updates.begin(1, "", UpdateFormat.FULL)
        with pytest.raises(PenstockError):  # it is open
            await updates.begin(2, "", UpdateFormat.FULL)


class WithAdapters(OneScoreAStep):
    """A vLLM that reads an adapter's files when it is loaded, and again when the test says that it was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[int, Path] = {}
        self.sampled = [1, 1]
        self.may_abort = asyncio.Event()
        self.may_abort.set()

    async def abort(self, name: str) -> None:
        await self.may_abort.wait()
        if name in self.inside:
            self.inside[name].set()

    async def add_lora(self, request: Any) -> bool:
        self.loaded[request.number] = request.directory
        self.reload()
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.loaded.pop(number, None) is not None

    def reload(self) -> list[str]:
        """The content of the adapters' files."""
        return [(path / "adapter_model.safetensors").read_text() for _, path in sorted(self.loaded.items())]

    def end_one(self, name: str) -> None:
        self.inside[name].set()


@pytest.fixture
def adapted(house: Any, core: Any, generations: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An engine with adapters, with its generations and its vLLM."""
    for module in (house.core, house.generation):
        monkeypatch.setattr(module, "lora_request", lambda adapter: adapter)
    llm = core.runtime.llm = WithAdapters()
    (work := tmp_path / "work").mkdir()
    engine = house.engine.VllmEngine(
        core, generations, MagicMock(), SimpleNamespace(name=str(work), cleanup=lambda: None)
    )
    return SimpleNamespace(engine=engine, generations=generations, llm=llm, work=work)


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
async def test_an_adapters_version_changes_before_its_requests_are_admitted(
    core: Any, adapted: Any, tmp_path: Path, mode: PauseMode
) -> None:
    """Requests for exactly the old version were answered by the new one, and those for the new one refused."""
    engine, generations, llm = adapted.engine, adapted.generations, adapted.llm
    await engine.load_adapter(adapter_source(tmp_path, 1))
    running = adapting(generations, "running")
    await turns()
    llm.may_abort.clear()
    core.admission.hold()  # the next come while it is loaded
    loading = asyncio.create_task(engine.load_adapter(adapter_source(tmp_path, 2), mode))
    old = adapting(generations, "old", exact_policy_version=1)
    new = adapting(generations, "new", exact_policy_version=2)
    await turns()
    core.admission.release()
    await turns()
    llm.may_abort.set()
    llm.end()
    await asyncio.wait((running, loading))
    await turns()
    llm.end()
    with pytest.raises(FailedPrecondition) as caught:
        await old
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert await new == [2]


@pytest.mark.requirement("R22", "R87")
async def test_an_adapter_that_is_replaced_with_wait_holds_only_its_own_requests(
    core: Any, adapted: Any, tmp_path: Path
) -> None:
    """A new one waits for nothing, a newer version for the completions of the one before."""
    engine, generations, llm = adapted.engine, adapted.generations, adapted.llm
    base = completing(generations, "base")
    await turns()
    async with asyncio.timeout(GUARD_S):
        await engine.load_adapter(adapter_source(tmp_path, 1), PauseMode.WAIT)
    running = adapting(generations, "running")
    await turns()
    loading = asyncio.create_task(engine.load_adapter(adapter_source(tmp_path, 2), PauseMode.WAIT))
    await turns()
    other, late = completing(generations, "other"), adapting(generations, "late")
    await turns()
    assert sorted(llm.inside) == ["base", "other", "running"] and not loading.done()
    llm.end_one("running")
    assert await running == [1]
    await loading
    await turns()
    llm.end()
    assert await late == [2]
    await asyncio.gather(base, other)


@pytest.mark.requirement("R22", "R87")
async def test_an_adapter_that_waits_does_not_wait_for_what_a_pause_froze(adapted: Any, tmp_path: Path) -> None:
    """It would until the resume; what is frozen goes on with its version."""
    engine, generations, llm = adapted.engine, adapted.generations, adapted.llm
    await engine.load_adapter(adapter_source(tmp_path, 1))
    running = adapting(generations, "running")
    await turns()
    loading = asyncio.create_task(engine.load_adapter(adapter_source(tmp_path, 2), PauseMode.WAIT))
    await turns()
    assert not loading.done()
    await engine.pause(PauseMode.KEEP)
    async with asyncio.timeout(GUARD_S):
        assert (await loading).policy_version == 2
    await engine.resume()
    llm.end()
    assert await running == [1]


@pytest.mark.requirement("R87")
async def test_a_request_for_an_exact_adapter_is_refused_when_another_came_after_its_admission(
    core: Any, adapted: Any, tmp_path: Path
) -> None:
    """Before its caller had its turn."""
    engine, generations = adapted.engine, adapted.generations
    await engine.load_adapter(adapter_source(tmp_path, 1))
    core.admission.hold()
    old = adapting(generations, "old", exact_policy_version=1)
    await turns()
    core.admission.release()
    core.adapters.put(core.adapters.prepare(adapter_source(tmp_path, 2)))
    await turns()
    adapted.llm.end()
    with pytest.raises(FailedPrecondition) as caught:
        await old
    assert caught.value.reason == "POLICY_VERSION_UNAVAILABLE" and core.admission.running == 0


@pytest.mark.requirement("R49")
async def test_vllm_can_read_a_replaced_adapter_again_until_its_last_user_has_ended(
    adapted: Any, tmp_path: Path
) -> None:
    """It does when it evicted one that still waits; without the file its core died. Afterwards no file stays."""
    engine, generations, llm = adapted.engine, adapted.generations, adapted.llm
    calls = []
    for version in (1, 2, 3):
        sent = adapter_source(tmp_path, version, temporary=True)
        await engine.load_adapter(sent)
        calls.append(adapting(generations, f"v{version}"))
        await turns()
        for file in sent.directory.iterdir():  # as AdapterUploads does when the next is in force
            file.unlink()
    assert llm.reload() == ["1", "2", "3"]
    llm.end()
    assert await asyncio.gather(*calls) == [[1], [2], [3]]
    await eventually(lambda: list(llm.loaded) == [3], "the replaced ones are unloaded")
    await eventually(lambda: len([*adapted.work.iterdir()]) == 1, "and their files are gone")
    await engine.unload_adapter("style")
    await eventually(lambda: not [*adapted.work.iterdir()], "no file stays")


@pytest.mark.requirement("R49")
async def test_an_adapter_that_vllm_refuses_leaves_no_file(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Any) -> bool:
        raise ValueError("no such module")

    monkeypatch.setattr(adapted.llm, "add_lora", refuse)
    with pytest.raises(PenstockError, match="no such module") as caught:
        await adapted.engine.load_adapter(adapter_source(tmp_path, 1, temporary=True))
    assert caught.value.reason == "ADAPTER_INVALID" and adapted.engine.adapters() == ()
    await eventually(lambda: not [*adapted.work.iterdir()], "no file stays")


class Salts(Llm):
    """A vLLM that reads images itself, which takes until the test lets it go on, and notes the salts that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.salts: dict[str, str] = {}
        self.reads = asyncio.Event()
        self.has_read = asyncio.Event()

    async def add_request(self, name: str, prompt: dict[str, Any], *_: object, lora_request: object) -> Any:
        self.reads.set()
        await self.has_read.wait()
        self.salts[name] = prompt["cache_salt"]
        completion = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="length", stop_reason=None)
        output = SimpleNamespace(outputs=[completion], num_cached_tokens=0, metrics=None, prompt_token_ids=None)
        return SimpleNamespace(get_nowait=lambda: output)


def seeing(generations: Any, name: str) -> asyncio.Task[list[Any]]:
    """A completion of a prompt with an image."""
    data = png(1, 1)
    media = (Media("image/png", hashlib.sha256(data).digest(), data, 0, 1, 5),)

    async def complete() -> list[Any]:
        wanted = GenerateRequest(name, TWO, Sampling(max_tokens=1), media=media)
        return [event async for event in generations.generate(wanted)]

    return asyncio.create_task(complete())


@pytest.mark.requirement("R87", "R137")
async def test_a_prompt_whose_images_are_decoded_across_an_update_matches_no_older_prefix(
    house: Any, core: Any, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens are reported as of the new version, so none may rest on what the old weights computed."""
    llm = core.runtime.llm = Salts()
    llm.has_read.set()
    decodes, go_on, known = threading.Event(), threading.Event(), house.generation.prompt_with_images

    def slowly(*given: Any) -> Any:
        decodes.set()
        assert go_on.wait(GUARD_S)
        return known(*given)

    monkeypatch.setattr(house.generation, "prompt_with_images", slowly)
    generating = seeing(generations, "r")
    await eventually(decodes.is_set, "its image is being decoded")
    async with core.stopped(PauseMode.KEEP):
        await core.put_in_force(2, "", None)
    go_on.set()
    await generating
    assert llm.salts == {"r": "v2"}


@pytest.mark.requirement("R87", "R137")
async def test_an_update_and_the_way_of_a_request_into_vllm_exclude_each_other(
    house: Any, core: Any, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads images before its core gets the request, whose salt is chosen by then."""
    llm = core.runtime.llm = Salts()
    decoded: list[Any] = []
    known = house.generation.prompt_with_images

    def counted(*given: Any) -> Any:
        decoded.append(known(*given))
        return decoded[-1]

    monkeypatch.setattr(house.generation, "prompt_with_images", counted)
    first = seeing(generations, "first")
    await llm.reads.wait()
    stands, go_on = asyncio.Event(), asyncio.Event()

    async def update() -> None:
        async with core.stopped(PauseMode.KEEP):
            stands.set()
            await go_on.wait()
            await core.put_in_force(2, "", None)

    second = seeing(generations, "second")
    updating = asyncio.create_task(update())
    await turns()
    assert not stands.is_set()
    llm.has_read.set()
    await stands.wait()
    assert isinstance((await first)[-1], Done)
    await eventually(lambda: len(decoded) == 2, "the second one's image is decoded")
    await turns()
    assert llm.salts == {"first": "v0"}
    go_on.set()
    await asyncio.gather(updating, second)
    assert llm.salts == {"first": "v0", "second": "v2"}


@pytest.mark.requirement("R49", "R87")
async def test_an_update_that_is_given_up_before_vllm_stops_holds_no_request(core: Any, generations: Any) -> None:
    llm = core.runtime.llm = Salts()
    first = seeing(generations, "first")
    await llm.reads.wait()

    async def update() -> None:
        async with core.stopped(PauseMode.KEEP):
            raise AssertionError

    updating = asyncio.create_task(update())
    await turns()
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    second = seeing(generations, "second")
    llm.has_read.set()
    await asyncio.gather(first, second)
    assert llm.salts == {"first": "v0", "second": "v0"}
