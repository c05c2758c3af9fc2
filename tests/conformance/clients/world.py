"""What a case runs in: the real services behind a network that can fail, and odd ones. Steps are carried out here."""

from __future__ import annotations

import asyncio
import hashlib
import io
import secrets
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.conformance.clients.cases import Case, differences
from tests.conformance.clients.fleet import DRIVERS, ENGINES, Fleet
from tests.conformance.clients.odd_services import OddDriver
from tests.conformance.clients.proxies import Proxy
from tests.conformance.clients.python_subject import observed_result, task_of
from tests.conformance.clients.subjects import Subject
from tests.integration.driver.stack import TOKEN
from tests.support.endpoints import mcp_agent
from tests.support.policy import bash, sampled
from tests.support.services.restarting import RestartableStack
from tests.support.services.stack import OBSERVER_TOKEN, Running
from tests.support.waiting import eventually, eventually_async

from penstock.client import NotFound
from penstock.client.rollouts.assays import AssayLine, existing_or_new_key, key_beside
from penstock.client.transport.endpoints import ServiceName
from penstock.client.wire.specs import digest
from penstock.interception.v1 import (
    intercept_service_pb2,
    intercept_service_pb2_grpc,
    interception_pb2,
    rollout_gate_service_pb2,
    rollout_gate_service_pb2_grpc,
)
from penstock.trajectory.v1 import trajectory_pb2

SERVICES: Final = ("sandbox", "driver", "interception", "inference")
VERSION: Final = "0.1.0"
"""Of every client."""
WRONG_TOKEN: Final = "0" * 64
"""Of nobody here."""

_RESERVED: Final = frozenset({"do", "start", "await", "runner", "expect", "error", "save", "target"})


@dataclass
class World:
    """The services, once for all cases. `proxies` stand before the real ones."""

    running: Running
    stack: RestartableStack
    proxies: Mapping[str, Proxy]
    odd: OddDriver
    addresses: Mapping[str, str]
    """Of servers that a case may name: `odd`, `odd-tls`, `empty`, `nobody`."""
    files: Mapping[str, Path]
    """That a case may name: `ca`, `other-ca`, `connection`, `open-connection`, `stale-connection`."""
    odds: Mapping[str, OddDriver]
    """Odd drivers: `odd`, `odd-tls`, and those to which they send callers."""
    folder: Path
    _estranged: set[ServiceName] = field(default_factory=set)
    """Services that were restarted with another trainer's token."""
    _fleet: Fleet | None = None
    used_fleet: bool = False
    """Whether the case that runs has used it."""

    async def fleet(self) -> Fleet:
        """The services of which there are several, which are started with the first case of them."""
        if self._fleet is None:
            self._fleet = await Fleet.start(self.folder)
        self.used_fleet = True
        return self._fleet

    async def close(self) -> None:
        """Ends what was started here."""
        if self._fleet is not None:
            await self._fleet.stop()

    async def restart(self, service: ServiceName, token: str) -> None:
        """Starts a service that was killed; with another trainer's token than before where `token` is not `good`."""
        good = self.stack.trainer_token
        if token != "good":
            self._estranged.add(service)
            self.stack.trainer_token = secrets.token_hex(32)
        try:
            await self.stack.start_again(service)
        finally:
            self.stack.trainer_token = good

    async def heal(self) -> None:
        """As new, for the next case."""
        for service in self._estranged:
            await self.stack.restart(service)
        self._estranged.clear()
        for proxy in self.proxies.values():
            await proxy.heal()
        if self._fleet is not None and self.used_fleet:
            await self._fleet.heal()
        self.used_fleet = False
        for odd in self.odds.values():
            odd.attempts.clear()
            odd.tokens.clear()
        self.odd.request_ids.clear()
        self.odd.abandoned.clear()
        self.odd.user_agents.clear()
        self.odd.routed.clear()

    def token(self, name: str) -> str | None:
        """By the name that cases have for it."""
        known = {"good": self.stack.trainer_token, "observer": OBSERVER_TOKEN, "wrong": WRONG_TOKEN}
        return known[name]


@dataclass
class Execution:
    """One case, with one subject."""

    world: World
    subject: Subject
    case: Case
    label: str
    """Unique to it: `${label}` in its steps."""
    _saved: dict[str, Any] = field(default_factory=dict)
    _started: dict[str, tuple[int, dict[str, Any], asyncio.Future[dict[str, Any]]]] = field(default_factory=dict)
    _agent: tuple[str, str] = ("", "")
    """Where this runner is an agent, and its token there."""
    _asking: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _fleet: Fleet | None = None
    """What the case's clients are connected to, where that is the many services."""
    _delivered: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By call, the command that delivered what was accepted: token ids and logprobs in hexadecimal."""

    async def run(self) -> None:
        """All steps; AssertionError names the first that went otherwise."""
        self._saved["label"] = self.label
        for number, step in enumerate(self.case.steps, 1):
            told = f"step {number} of {self.case.name!r}, {dict(step)}"
            try:
                found = await self._step(step)
            except AssertionError as error:
                raise AssertionError(f"{told}:\n{error}") from error
            assert not found, f"{told}:\n" + "\n".join(found)

    async def _step(self, step: Mapping[str, Any]) -> list[str]:
        if "at" in step and step.get("do") == "connect":
            self._fleet = await self.world.fleet()
        if "runner" in step:
            given = self._resolved(step)
            if self._fleet is not None:
                return await self._act_on_fleet(step["runner"], given)
            return await self._act(step["runner"], given)
        if "await" in step:
            _, command, answer = self._started.pop(step["await"])
        else:
            command = self._command(step)
            number, answer = self.subject.send(command)
            if "start" in step:
                self._started[step["start"]] = number, command, answer
                return []
        return self._judge(step, command, await self.subject.wait(answer, command["do"]))

    def _judge(self, step: Mapping[str, Any], command: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
        if command["do"] == "deliver" and "ok" in seen:
            self._delivered[command["call_id"]] = command
        if ("error" in step) != ("error" in seen):
            return [f"it answered {seen}; {self.subject.said()}"]
        name = "error" if "error" in step else "expect"
        observed = seen["error" if "error" in seen else "ok"]
        for key, path in step.get("save", {}).items():
            value: Any = observed
            for part in str(path).split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
            self._saved[key] = value
        return list(differences(self._substituted(step.get(name, {})), observed))

    def _resolved(self, step: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in step.items() if name not in _RESERVED}
        return {name: self._substituted(value) for name, value in given.items()}

    def _substituted(self, value: Any) -> Any:
        if isinstance(value, str):
            if value.startswith("${") and value.endswith("}") and value.count("${") == 1:
                return self._saved[value[2:-1]]
            for name, item in self._saved.items():
                if isinstance(item, str):
                    value = value.replace("${" + name + "}", item)
            return value
        if isinstance(value, Mapping):
            if "$repeat" in value:
                return value["$repeat"] * value["times"]
            return {name: self._substituted(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._substituted(item) for item in value]
        return value

    def _command(self, step: Mapping[str, Any]) -> dict[str, Any]:
        name = step["do"]
        command = {"do": name, "client": "main", "session": "main", **self._resolved(step)}
        if name == "connect" and "at" in command:
            assert self._fleet is not None
            command["addresses"] = self._fleet.addresses(command.pop("at"))
            command["token"] = TOKEN
        elif name == "connect":
            self._place(command)
        elif name == "deliver":
            _encode(command)
        elif "assay" in command:
            command["assay"] = str(self._assay(**command["assay"]))
        elif name == "abort":
            command["target"] = self._started[step["target"]][0]
        return command

    def _assay(self, of: Mapping[str, Any], verdict: str) -> Path:
        """A file with one signed line, and its key beside it."""
        file = self.world.files["ca"].with_name(f"{secrets.token_hex(4)}.jsonl")
        key = existing_or_new_key(key_beside(file))
        task = task_of(dict(of))
        failed = ("NOTHING_REWARDED", "X") if verdict == "failed" else ()
        line = AssayLine(task_id=task.task_id, digest=digest(task), passed=not failed, failed=failed, backend="ü")
        signed = line.signed(key)
        file.write_bytes(signed.replace(b'"backend":"', b'"backend":"x') if verdict == "forged" else signed)
        return file

    def _place(self, command: dict[str, Any]) -> None:
        """Names of tokens, servers and files become what they stand for."""
        if "connection_file" in command:
            command["connection_file"] = str(self.world.files[command["connection_file"]])
        elif "host" not in command:
            named = command.pop("driver", None)
            command["addresses"] = {service: self.world.proxies[service].address for service in SERVICES}
            if named is not None:
                command["addresses"]["driver"] = self.world.addresses.get(named, named)
            if "inference" in command:
                command["addresses"]["inference"] = self.world.addresses[command.pop("inference")]
            command.setdefault("token", "good")
        if "token" in command:
            token = command.pop("token")
            if token != "none":
                command["token"] = self.world.token(token)
        if "ca" in command:
            command["tls"] = {"ca": str(self.world.files[command.pop("ca")])}

    async def _act(self, action: str, given: Mapping[str, Any]) -> list[str]:
        """What the runner does itself."""
        match action:
            case "network":
                await getattr(self.world.proxies[given["service"]], given["state"])()
            case "kill":
                await self.world.stack.kill(given["service"])
            case "restart":
                await self.world.restart(given["service"], given.get("token", "good"))
            case "calls":
                await self._calls(given)
            case "asked":
                asked = self.world.odds[given.get("at", "odd")]
                return list(differences(given["times"], asked.attempts[given["rollout_id"]], "attempts"))
            case "has-token":
                sent = {*self.world.odds[given["at"]].tokens}
                return list(differences(True, sent == {f"Bearer {self.world.token('good')}"}, "token"))
            case "not-called":
                return list(differences([], self.world.odds[given["at"]].tokens, "calls"))
            case "asked-for":
                await eventually(lambda: self.world.odd.attempts[given["rollout_id"]] > 0, "the service was asked")
            case "tail-of":
                count, begun = len(given["all"]), given["from"]
                assert count > begun, f"there are {count} events only"
                found = list(differences(list(range(1, count + 1)), given["all"], "all"))
                return found + list(differences(list(range(begun + 1, count + 1)), given["rest"], "rest"))
            case "agent-opens":
                await self._open_at_the_gate(given["run_id"])
            case "agent-asks":
                arguments = given.get("arguments", {})
                asking = asyncio.create_task(self._call_tool(given["tool"], arguments))
                self._asking[given.get("as", "it")] = asking
            case "agent-hears":
                async with asyncio.timeout(60):
                    return list(differences(given["answer"], await self._asking.pop(given.get("as", "it")), "answer"))
            case "tar-has":
                with tarfile.open(fileobj=io.BytesIO(bytes.fromhex(given["tar"]))) as tar:
                    names = [Path(name).name for name in tar.getnames()]
                    return [] if given["name"] in names else [f"it has {names}"]
            case "named-itself":
                language = self.subject.language
                return [
                    f"it named itself {name}"
                    for name in self.world.odd.user_agents
                    if not name.startswith(f"penstock-{language}/{VERSION}")
                ] + ([] if self.world.odd.user_agents else ["nobody asked"])
            case "routed":
                return list(
                    differences({name: name for name in given["rollout_ids"]}, self.world.odd.routed, "headers")
                )
            case "asked-once":
                return list(differences(1, len(set(self.world.odd.request_ids)), "request ids"))
            case "abandoned":
                if given.get("if-asked") and not self.world.odd.attempts[given["rollout_id"]]:
                    return []  # the deadline was over on the way there
                async with asyncio.timeout(60):
                    await self.world.odd.abandoned.wait()
            case "whole-prompt":
                recorded = await self.world.running.ps.gate.call(given["call_id"])
                assert recorded.prompt_token_ids.size, "the gate has no prompt"
                return list(differences(recorded.prompt_token_ids.tobytes().hex(), given["prompt"], "prompt"))
            case "policies":
                return list(_policies(given))
            case "same-results":
                return await self._same_results(given["group_id"], given["results"])
            case _:
                raise AssertionError(f"the runner has no {action}")
        return []

    async def _act_on_fleet(self, action: str, given: Mapping[str, Any]) -> list[str]:
        """What the runner does itself where there are many services."""
        assert self._fleet is not None
        fleet = self._fleet
        match action:
            case "network":
                await getattr(fleet.proxies[given["service"]], given["state"])()
            case "state":
                await fleet.state(given["service"], given["state"])
            case "kill":
                await fleet.kill(given["service"])
            case "restart":
                await fleet.restart(given["service"])
            case "move":
                await fleet.move(given["service"])
            case "drain":
                await fleet.drain(given["service"])
            case "gates":
                await fleet.list_gates(given["listed"])
            case "homes":
                homes = {name.split(".")[1] for name in given["ids"]}
                return list(differences(given["services"], len(homes), f"homes {homes}"))
            case "ranked":
                for name in given["rollout_ids"]:
                    await fleet.has(max(DRIVERS, key=lambda driver: _rank(name, driver)), name)
            case "agent-opens":
                await fleet.open(given["at"], given["run_id"])
            case "agent-asks-model":
                fleet.ask(given["at"], f"{given['as']} {self.label}")
            case "agent-has-answer":
                await fleet.answered(f"{given['as']} {self.label}")
            case "calls":

                async def reached() -> bool:
                    return bool(await fleet.calls(given["at"]) == given["states"])

                await eventually_async(reached, f"{given['at']} has {given['states']}")
            case "held":
                await fleet.holds(given["at"])
            case "push":
                await fleet.push(given["service"], given["after"] + given.get("by", 1))
            case "in-force":
                wanted = dict.fromkeys(given.get("of", ENGINES), given["policy_version"])
                return list(differences(wanted, await fleet.in_force(), "policy versions"))
            case "paused":
                return list(differences(given["engines"], await fleet.paused(), "paused"))
            case "tools-at":
                await fleet.offers(given["at"], given["run_id"], given["names"])
            case _:
                raise AssertionError(f"the runner has no {action} where there are many services")
        return []

    async def _open_at_the_gate(self, run_id: str) -> None:
        """A rollout at the gate alone, whose agent is this runner: it calls tools."""
        service = self.world.running.ps._services["interception"]
        stub = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(service.channel)
        name = secrets.token_hex(8)
        request = rollout_gate_service_pb2.OpenRolloutRequest(
            request_id=name, rollout_id=f"tools-{name}", run_id=run_id, mode=interception_pb2.MODE_INTERCEPTION_GATE
        )
        answer = await service.call(stub.OpenRollout, request)
        url = f"http://{answer.ingress_address}/rollout/{answer.rollout.rollout_id}/mcp"
        self._agent = (url, answer.token)

    async def _call_tool(self, tool: str, arguments: Any) -> Any:
        url, token = self._agent
        _, told, _ = await mcp_agent.post(url, token, mcp_agent.tool_call(tool, arguments, secrets.token_hex(4)))
        return told.get("result", told)

    async def _calls(self, given: Mapping[str, Any]) -> None:
        """Waits until the gate has exactly so many calls of these rollouts in each state."""
        wanted = Counter({state: count for state, count in given["states"].items() if count})

        async def reached() -> bool:
            return await self._states(given["rollout_ids"]) == wanted

        await eventually_async(reached, f"the gate has {dict(wanted)}")

    async def _states(self, rollout_ids: list[str]) -> Counter[str]:
        service = self.world.running.ps._services["interception"]
        stub = intercept_service_pb2_grpc.InterceptServiceStub(service.channel)
        states: Counter[str] = Counter()
        for rollout_id in rollout_ids:
            request = intercept_service_pb2.ListCallsRequest(rollout_id=rollout_id)
            try:
                answer = await service.call(stub.ListCalls, request, repeatable=True)
            except NotFound:
                continue  # created, and not at the gate yet
            states.update(trajectory_pb2.CallState.Name(call.state)[11:].lower() for call in answer.calls)
        return states

    async def _same_results(self, group_id: str, told: list[dict[str, Any]]) -> list[str]:
        """What the subject read is what the services keep, and what was delivered is in it bit for bit."""
        group = await self.world.running.ps.groups.attach(group_id)
        kept = [observed_result(result) for result in await group.results()]
        found = list(differences(kept, told, "results"))
        seen: list[str] = []
        for sample in (sample for result in told for sample in result["samples"]):
            trained = [False] * (len(sample["input_ids"]) // 8)
            for call_id, start, end, untrained in sample["turns"]:
                seen.append(call_id)
                trained[start:end] = [not untrained] * (end - start)
                found += self._turn(sample, call_id, start, end)
            found += differences(bytes(trained).hex(), sample["loss_mask"], "loss mask")
        found += differences(sorted(self._delivered), sorted(seen), "calls that were answered")
        return found

    def _turn(self, sample: Mapping[str, Any], call_id: str, start: int, end: int) -> Iterator[str]:
        """How a turn of a sample differs from what was delivered for it."""
        if (sent := self._delivered.get(call_id)) is not None:
            where = slice(8 * start, 8 * end)
            yield from differences(sent["token_ids"], sample["input_ids"][where], f"token ids of {call_id}")
            yield from differences(sent["logprobs"], sample["logprobs"][where], f"logprobs of {call_id}")
            versions = {at: item[0] for item in sample["versions"] for at in range(item[1], item[2])}
            wanted = [sent.get("policy_version")] * (end - start)
            yield from differences(wanted, [versions.get(at) for at in range(start, end)], f"versions of {call_id}")


def _policies(given: Mapping[str, Any]) -> Iterator[str]:
    """How samples are not one for each policy, each of which trains its own turns and no others."""
    trained = {
        sample["policy_id"]: [at for at, turn in enumerate(sample["turns"]) if not turn[3]]
        for sample in given["samples"]
    }
    yield from differences(given["policies"], trained, "trained turns")
    yield from differences(len(given["policies"]), len(given["samples"]), "samples")
    for sample in given["samples"]:
        yield from differences(given["turns"], sample["turn_policies"], "policies of turns")
        untrained = {turn[3] for turn in sample["turns"] if turn[3]}
        yield from differences(["OTHER_POLICY"], sorted(untrained), "reasons")


def _rank(name: str, driver: str) -> str:
    """By which every client chooses the driver of an id that it chose."""
    return hashlib.sha256(f"{name}\0{driver}".encode()).hexdigest()


def _encode(command: dict[str, Any]) -> None:
    """`text` and `bash` become what an engine would have sampled for them; `logprobs` may be given as numbers."""
    text = bash(command.pop("bash")) if "bash" in command else command.pop("text", None)
    given = command.get("logprobs", [])
    ids, made = sampled(text) if text is not None else (command["token_ids"], [])
    logprobs = [*given, *made[len(given) :]]
    command["token_ids"] = struct.pack(f"<{len(ids)}i", *ids).hex()
    command["logprobs"] = struct.pack(f"<{len(logprobs)}f", *map(float, logprobs)).hex()
    if (top := command.get("top")) is not None:
        rows, values = top["token_ids"], [*map(float, top["logprobs"])]
        given_ids, given_values = struct.pack(f"<{len(rows)}i", *rows), struct.pack(f"<{len(values)}f", *values)
        command["top"] = {"count": top["count"], "token_ids": given_ids.hex(), "logprobs": given_values.hex()}
