"""A trainer as a program, to be killed: it answers the calls of the rollouts that have a label, and keeps account.

No two of its answers are equal, so a prompt shows which answers an agent has received. The account has a line for each
call that it was asked, before it answers, and one for each answer that the gate has acknowledged.

Run as a process, `python -m tests.support.services.trainer`, whose settings are variables of the environment:
PENSTOCK_TRAINER_ and ADDRESSES (JSON, as of `connect`), OPERATOR_TOKEN, LABEL (the value of the label `test`) and
ACCOUNT (a path). It prints its ready line once it has its session.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.support.policy import Reply, bash, in_turn, prompt_text, sampled

from penstock.client import Completion, LogprobsMode, ModelCall, PenstockError, connect

WORD: Final = "kiwi"
CALLS: Final = 3


def policy() -> Reply:
    """Two turns of work, and an end; with a mark that no other answer has."""
    mark = secrets.token_hex(4)
    return in_turn(bash(f"echo {mark}"), bash(f"cp note.txt out.txt # {mark}"), f"Done, {mark}.")


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of an account."""

    rollout_id: str
    index: int
    prompt: list[int]
    answer: list[int]
    acknowledged: bool


def read(account: Path) -> list[Asked]:
    """The calls of an account. One that was asked again, by another session, is there again."""
    lines = [json.loads(line) for line in account.read_text().splitlines()] if account.exists() else []
    acknowledged = {line["asked"] for line in lines if line["acknowledged"]}
    return [
        Asked(line["rollout_id"], line["index"], line["prompt"], line["answer"], line["asked"] in acknowledged)
        for line in lines
        if not line["acknowledged"]
    ]


async def _main() -> None:
    addresses, token, label, account = (
        os.environ[f"PENSTOCK_TRAINER_{name}"] for name in ("ADDRESSES", "OPERATOR_TOKEN", "LABEL", "ACCOUNT")
    )
    async with (
        connect(json.loads(addresses), token) as ps,
        ps.intercept(labels={"test": label}) as session,
        asyncio.TaskGroup() as tasks,
    ):
        sys.stdout.write('{"event": "ready", "address": "", "endpoints": {}}\n')
        sys.stdout.flush()
        with Path(account).open("a", buffering=1) as file:

            def write(**line: Any) -> None:
                file.write(json.dumps(line) + "\n")

            async for call in session.calls():
                tasks.create_task(_answer(call, write))


async def _answer(call: ModelCall, write: Callable[..., None]) -> None:
    prompt, asked = call.prompt_token_ids.tolist(), secrets.token_hex(8)
    ids, logprobs = sampled(policy()(prompt_text(call)))
    write(asked=asked, rollout_id=call.rollout_id, index=call.index, prompt=prompt, answer=ids, acknowledged=False)
    completion = Completion.of_tokens(
        np.array(ids), np.array(logprobs), policy_version=1, logprobs_mode=LogprobsMode.PROCESSED
    )
    with suppress(PenstockError):  # the call has ended meanwhile: its agent is lost
        await call.deliver(completion)
        write(asked=asked, acknowledged=True)


if __name__ == "__main__":
    asyncio.run(_main())
