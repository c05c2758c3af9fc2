"""An SGLang server under control: its weights and their version, its pauses, its adapters.

Invariants:

- The server's name of its weights is the number of the policy version in force.
- Weights change only while the server stands still by its mode `retract`, which first processes the tokens of the step
  under way: only then are its reports of versions exact. What was in flight is computed again from its token ids.
- `path` and `version` always describe the weights in force. A server that came back with others gets these again. Its
  path alone does not show them: tensors that another client sends leave it as it is, and change the name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Internal, InvalidArgument, PenstockError, Violation
from penstock_inference.domain.weights import PauseMode
from penstock_inference.engines.adapters import AdapterTable, LoadedAdapter, adapter_invalid
from penstock_inference.engines.admission import Admission
from penstock_inference.engines.openai.wire import Endpoint
from penstock_inference.engines.sglang.answers import foreign
from penstock_inference.engines.sglang.in_flight import SglangFlight
from penstock_inference.engines.sglang.probe import Identity

ALREADY_LOADED = "already loaded"
"""In the server's refusal of an adapter's name that it has."""

UNNAMED = frozenset({"", "default"})
"""The server's names of weights that nobody named; empty where it reports none."""

_RETRACT = {"mode": "retract"}

_log = structlog.get_logger("penstock.inference")


class Server:
    """The server's state, as this service set it.

    Args:
        endpoint: its address.
        version: of the weights that it serves at the start, if their name there is no number; None is 0.
        label: of that version.
        adapters: those in force.
        limits: how many requests run at once, and how many more may wait.
        lost: is called with an error after which the server's state is unknown.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        version: int | None,
        label: str,
        adapters: AdapterTable,
        limits: tuple[int, int],
        lost: Callable[[PenstockError], None],
    ) -> None:
        self.endpoint = endpoint
        self.version = version
        self.label = label
        self.adapters = adapters
        self.admission = Admission(*limits, self._version_of)
        self.flights: set[SglangFlight] = set()
        self.path = ""
        """The weights in force, as the server finds them; empty before it was reached."""
        self.base_known = True
        """Whether the weights at the start are those of the model directory, as far as anyone says."""
        self._lost = lost
        self._adopted = ""
        """The server's own name of the weights in force, until others are loaded."""
        self._doubtful = False
        """A load began and did not end, so the server may have any weights."""
        self._frozen_for: set[str] = set()
        self._changing = asyncio.Lock()
        """Held while weights change, and while a server that came back gets those in force."""
        self._drops = TaskOwner(unlogged=(PenstockError,))

    async def aclose(self) -> None:
        """Ends what is under way. Idempotent."""
        await self._drops.aclose()

    async def take_over(self, there: Callable[[], Awaitable[Identity]]) -> None:
        """Give the server that was reached the weights and adapters that are in force here, and let it continue.

        `there` asks it which weights it serves. Raises PenstockError.
        """
        async with self._changing:
            found = await there()
            if not self.path:
                self._adopt(found)
            name = found.weight_version
            is_ours = name in UNNAMED or name in (str(self.version), self._adopted)
            if self._doubtful or found.model_path != self.path or not is_ours:
                _log.warning("the server gets the weights in force again", version=self.version, found=name[:40])
                await self.endpoint.post("/pause_generation", _RETRACT)
                # What it computed under this version's salt may be of the other weights.
                await self._load(self.path, self.version or 0, flush_cache=True)
            elif name != str(self.version):
                await self._name(self.version or 0)
            for adapter in self.adapters:
                with suppress(InvalidArgument):  # it has it
                    await self._load_adapter(adapter)
            await self._continue()

    def _adopt(self, found: Identity) -> None:
        """Take the server's weights and their number, if they have one: a service before gave it to them."""
        named = found.weight_version
        if named.isascii() and named.isdecimal() and len(named) < 19:
            if self.version not in (None, int(named)):
                _log.warning("the server's number of its weights outweighs the option policy_version", version=named)
            self.version = int(named)
            self.base_known = not self.version
        elif self.version is None:
            self.version = 0
        self.path, self._adopted = found.model_path, named

    async def settle(self) -> None:
        """Stop or continue the server, as the reasons to freeze it require. Raises PenstockError."""
        if self._frozen_for:
            await self.endpoint.post("/pause_generation", _RETRACT)
        else:
            await self._continue()

    async def _continue(self) -> None:
        await self.endpoint.post("/continue_generation", {"torch_empty_cache": False})

    def _version_of(self, adapter: str) -> int:
        return self.adapters.get(adapter).info.policy_version if adapter else self.version or 0

    async def check_name(self, name: Any, version: int | None) -> None:
        """Check the server's name of the weights that computed an answer asked for under `version`; None: it gave none.

        Raises FailedPrecondition (UPSTREAM_ANSWER_INVALID) if it is not that version's, and that is still in force.
        """
        if name is None or name == str(version):
            return
        async with self._changing:  # a load that is under way has named the weights and not returned yet
            if version == self.version:
                raise foreign(name)

    # Standing still --------------------------------------------------------------------------------------------------

    @property
    def frozen_by_pause(self) -> bool:
        """Whether a pause has frozen what runs."""
        return "pause" in self._frozen_for

    async def freeze(self, reason: str) -> None:
        """Stop the server between two steps, until `thaw` was called for every reason. If it fails, it continues."""
        is_new = reason not in self._frozen_for
        self._frozen_for.add(reason)
        try:
            await self._ask(self.settle)
        except BaseException:
            if is_new:
                with suppress(PenstockError):  # the caller gets the first error
                    await self.thaw(reason)
            raise

    async def thaw(self, reason: str) -> None:
        """Let the server continue, unless another reason keeps it frozen."""
        self._frozen_for.discard(reason)
        await self._ask(self.settle)

    async def idle(self) -> None:
        """Wait until nothing runs, or until a pause has frozen what runs."""
        while self.admission.running and not self.frozen_by_pause:
            await self.admission.idle()

    async def unused(self, adapter: LoadedAdapter) -> None:
        """Wait until no request uses it, or until a pause has frozen what runs."""
        while adapter.users and not self.frozen_by_pause:
            await self.admission.woken()

    @asynccontextmanager
    async def stopped(self, mode: PauseMode, abort: Callable[[], object]) -> AsyncIterator[None]:
        """While the context is open, the server stands still and nothing is admitted. `abort` aborts what runs."""
        self.admission.hold()
        try:
            if mode is PauseMode.ABORT:
                abort()
                for flight in list(self.flights):
                    await flight.ended.wait()
            elif mode is PauseMode.WAIT:
                await self.idle()
            async with self._changing:
                await self.freeze("update")
                try:
                    yield
                finally:
                    with suppress(PenstockError):  # it counts as lost then, and continues when it is found
                        await self.thaw("update")
        finally:
            self.admission.release()

    # Weights ---------------------------------------------------------------------------------------------------------

    async def load(self, path: str, version: int, label: str) -> None:
        """Put weights in force; call it while the server is stopped.

        Raises FailedPrecondition (GENERATIONS_IN_FLIGHT); InvalidArgument (WEIGHTS_INVALID) if the server refuses them:
        then those before stay in force; Internal (WEIGHTS_NOT_LOADED) if it refuses these too: then it counts as lost.
        """
        running = [flight for flight in self.flights if not flight.ended.is_set() and not flight.request.adapter]
        if any(flight.pinned for flight in running):
            raise FailedPrecondition(
                "generations are frozen by a pause, and this server does not report which weights sampled their tokens:"
                " resume, or abort them, first",
                reason="GENERATIONS_IN_FLIGHT",
            )
        for flight in running:
            flight.weights_change(version)
        try:
            await self._ask(lambda: self._load(path, version))
        except InvalidArgument as error:
            await self._load_back()
            text = error.violations[0].description if error.violations else "are refused"
            raise InvalidArgument(
                f"SGLang refuses the weights: {text}", reason="WEIGHTS_INVALID", violations=[Violation("path", text)]
            ) from error
        self.path, self.version, self.label, self._adopted = path, version, label, ""
        self.base_known = True
        with suppress(PenstockError):  # each version's prefixes have a salt of their own: this only frees memory
            await self.endpoint.command("/flush_cache", {})
        self.admission.look()

    async def _load_back(self) -> None:
        """Have the server load the weights in force again: its own way back is from the path that has just failed."""
        try:
            await self._ask(lambda: self._load(self.path, self.version or 0))
        except InvalidArgument as error:
            lost = Internal(
                f"SGLang does not take the weights of version {self.version} back: restart it",
                reason="WEIGHTS_NOT_LOADED",
            )
            self._lost(lost)
            raise lost from error

    async def _load(self, path: str, version: int, *, flush_cache: bool = False) -> None:
        self._doubtful = True
        await self.endpoint.post(
            "/update_weights_from_disk",
            {
                "model_path": path,
                "weight_version": str(version),
                "abort_all_requests": False,
                "flush_cache": flush_cache,
            },
        )
        self._doubtful = False

    async def _name(self, version: int) -> None:
        await self.endpoint.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # Adapters --------------------------------------------------------------------------------------------------------

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Have the server load it. Raises InvalidArgument (ADAPTER_INVALID)."""
        try:
            await self._load_adapter(adapter)
        except InvalidArgument as error:
            text = error.violations[0].description if error.violations else "is refused"
            if ALREADY_LOADED not in text:
                raise adapter_invalid(f"cannot be loaded: {text}") from error
            # Of a service before this one, perhaps with other files.
            await self._drop(adapter)
            await self._load_adapter(adapter)

    def drop_if_unused(self, adapter: LoadedAdapter) -> None:
        """Have the server unload a replaced version of an adapter, once it is unused."""
        if adapter.replaced and not adapter.users:
            self._drops.start(self._drop(adapter), "sglang-drop-adapter")

    async def _load_adapter(self, adapter: LoadedAdapter) -> None:
        body = {"lora_name": adapter.versioned_name, "lora_path": str(adapter.directory), "pinned": False}
        await self.endpoint.post("/load_lora_adapter", body)

    async def _drop(self, adapter: LoadedAdapter) -> None:
        await self.endpoint.post("/unload_lora_adapter", {"lora_name": adapter.versioned_name})

    async def _ask(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await call()
        except InvalidArgument:
            raise
        except PenstockError as error:
            self._lost(error)
            raise
