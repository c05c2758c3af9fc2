"""Verifies exported trajectories against the hash chains of their rollouts, offline (docs/trajectories.md has the
bytes).

The gate extends a rollout's chain with each call that it delivers, and the chain can be recomputed from the rows: a
changed token, logprob, version or sampling setting, or a call left out, added or moved, shows at once. Data derived
from calls (samples, masks, weights) is derived again, and each row's digest reveals any other change. This proves that
rows are what the gate recorded, not that the gate was honest.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Final

import numpy as np

from penstock.analysis.verify_replays import Calls, check_replay, key_of, origin_of
from penstock.analysis.verify_rows import Problem, Proof, checked_origins, checked_rows, has_its_rows, unlike
from penstock.analysis.verify_samples import check_policies, check_samples
from penstock.tables.columns import Row, Table

__all__ = ["Problem", "Proof", "Row", "verify"]

_START: Final = b"penstock.trajectory.v1 chain\0"


def verify(
    turns: Iterable[Row],
    sequences: Iterable[Row] = (),
    tool_calls: Iterable[Row] = (),
    *,
    against: Iterable[Row] | None = None,
) -> Proof:
    """Checks the rows of `turns` and computes every rollout's chain from them; compares the other tables with them.

    Args:
        turns: rows as `export.turns` makes them, in any order.
        sequences: rows as `export.sequences` makes them: each token, the mask, logprobs, versions, samplings and
            weights must match the calls.
        tool_calls: rows as `export.tool_calls` makes them.
        against: rows as `export.turns` makes them, of earlier attempts or of parents: each replayed call of `turns` has
            the prompt, ids, logprobs and versions of the call that it names as its origin. None = no call is compared.
            Their own chains are not computed.

    Raises:
        InvalidArgument: `ROW_INVALID`, a row is not of its table.
    """
    proof = Proof()
    rollouts = checked_rows(turns, Table.TURNS, proof)
    samples = checked_rows(sequences, Table.SEQUENCES, proof)
    tools = checked_rows(tool_calls, Table.TOOL_CALLS, proof)
    proof.rollouts, proof.samples, proof.tool_calls = len(rollouts), _count(samples), _count(tools)
    for rollout_id, rows in rollouts.items():
        _check_chain(rollout_id, rows, proof)
        _check_calls(rollout_id, rows, proof)
        for message in check_policies(rows, samples.get(rollout_id, ())):
            proof.problems.append(Problem(rollout_id, "", message))
    for table, others in ((Table.SEQUENCES, samples), (Table.TOOL_CALLS, tools)):
        for rollout_id in others.keys() & rollouts.keys():
            for name in unlike(others[rollout_id][0], rollouts[rollout_id][0]):
                proof.problems.append(Problem(rollout_id, "", f"its rows of {table} and turns differ in {name}"))
    for rollout_id, rows in samples.items():
        proof.problems += [
            Problem(rollout_id, "", f"sample {row['sample_id']}: its tensors differ from their digests")
            for row in rows
            if not has_its_rows(row.get("tensors"))
        ]
        calls = {row["call_id"]: row for row in rollouts.get(rollout_id, ())}
        proof.problems += [Problem(rollout_id, *found) for found in check_samples(rows, calls)]
    for rollout_id, rows in tools.items():
        for row in rows:
            if not _is_digest_of(row["result_sha256"], row["result_json"]):
                proof.problems.append(Problem(rollout_id, "", f"tool call {row['tool_call_id']}: another result"))
    if against is not None:
        named = {origin_of(row) for rows in rollouts.values() for row in rows}
        origins = {key: row for row in checked_origins(against, proof) if (key := key_of(row)) in named}
        for rollout_id, rows in rollouts.items():
            _check_replays(rollout_id, rows, origins, proof)
    return proof


def _check_replays(rollout_id: str, rows: list[Row], origins: Calls, proof: Proof) -> None:
    for row in rows:
        if origin_of(row) is None:
            continue
        found = check_replay(row, origins)
        if found is None:
            proof.unproven_replays += 1
            continue
        proof.replayed += 1
        proof.problems += [Problem(rollout_id, row["call_id"], message) for message in found]


def _count(rollouts: dict[str, list[Row]]) -> int:
    return sum(map(len, rollouts.values()))


def _check_chain(rollout_id: str, rows: list[Row], proof: Proof) -> None:
    linked = sorted((row for row in rows if row["chain_index"] is not None), key=_index)
    head = hashlib.sha256(_START + rollout_id.encode()).digest()
    for place, row in enumerate(linked):
        call_id, stated = row["call_id"], _digest(row["chain_sha256"])
        if row["chain_index"] != place:
            what = "is there twice" if row["chain_index"] < place else "is missing"
            proof.problems.append(Problem(rollout_id, "", f"call number {min(row['chain_index'], place)} {what}"))
            return
        if row["capture_level"] in ("tokens", "tokens_and_logprobs"):
            head = _next(head, row)
            proof.calls += 1
            proof.tokens += len(row["completion_token_ids"] or ())
            if head != stated:
                proof.problems.append(
                    Problem(rollout_id, call_id, "its tokens, logprobs, versions or sampling differ from the record")
                )
            elif not _has_its_top(row):
                proof.problems.append(Problem(rollout_id, call_id, "its alternatives differ from the record"))
            elif not has_its_rows(row.get("completion_tensors")):
                proof.problems.append(Problem(rollout_id, call_id, "its tensors differ from the record"))
        else:
            proof.unproven += 1
        # Continue from the stated hash, so that one broken call is one problem.
        head = stated
    last = next((row["rollout_chain_sha256"] for row in rows if row.get("rollout_chain_sha256")), "")
    if last and head != _digest(last):
        proof.problems.append(Problem(rollout_id, "", "its last calls are missing"))


def _digest(text: str | None) -> bytes:
    """Decodes hexadecimal digits; anything else becomes bytes that no digest equals."""
    try:
        return bytes.fromhex(text or "")
    except ValueError:
        return b""


def _next(head: bytes, row: Row) -> bytes:
    """Returns the chain's hash after a call; see docs/trajectories.md."""
    sampling = row["sampling_used"]
    if sampling is not None:
        # The chain uses the field's name on the wire.
        sampling = {name.removesuffix("_json"): value for name, value in sampling.items() if value not in (None, [])}
    facts = {
        "call_id": row["call_id"],
        "versions": [[span["policy_version"], span["start"], span["end"]] for span in row["policy_spans"]],
        "logprobs_mode": row["logprobs_mode"] if row["completion_logprobs"] is not None else None,
        "sampling_used": sampling,
    }
    if row.get("completion_top_sha256"):
        facts["top_sha256"] = row["completion_top_sha256"]
    if row.get("completion_tensors"):
        names = ("name", "dtype", "start", "shape", "sha256")
        facts["tensors"] = [[one.get(name) for name in names] for one in row["completion_tensors"]]
    if row.get("prompt_images"):
        facts["media"] = [[one["sha256"], one["token_start"], one["token_count"]] for one in row["prompt_images"]]
    if row.get("policy_id"):
        facts["policy_id"] = row["policy_id"]
    state = hashlib.sha256(head)
    for name, kind in (("prompt_token_ids", "<i4"), ("completion_token_ids", "<i4"), ("completion_logprobs", "<f4")):
        values = row[name]
        state.update(hashlib.sha256(b"" if values is None else np.asarray(values, kind).tobytes()).digest())
    state.update(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    return state.digest()


def _has_its_top(row: Row) -> bool:
    """Whether the rows of alternatives, if the export has them, are those of the digest that the chain covers."""
    ids, logprobs = row.get("completion_top_token_ids"), row.get("completion_top_logprobs")
    if ids is None and logprobs is None:
        return True
    if ids is None or logprobs is None or list(map(len, ids)) != list(map(len, logprobs)):
        return False
    values = [[-np.inf if value is None else value for value in line] for line in logprobs]
    state = hashlib.sha256(np.asarray(ids, "<i4").tobytes() + np.asarray(values, "<f4").tobytes())
    return state.hexdigest() == row.get("completion_top_sha256")


def _check_calls(rollout_id: str, rows: list[Row], proof: Proof) -> None:
    """Checks the fields of calls that follow from other calls or from the call itself."""
    calls = {row["call_id"]: row for row in rows}
    for row in rows:
        body = row.get("request_body")
        # Bytes that were not valid UTF-8 are lost in the text.
        if body is not None and "\ufffd" not in body and not _is_digest_of(row.get("request_body_sha256"), body):
            proof.problems.append(Problem(rollout_id, row["call_id"], "its request body does not match its digest"))
        if not _continues(row, calls.get(row.get("parent_call_id") or "")):
            proof.problems.append(Problem(rollout_id, row["call_id"], "its shared tokens differ from its parent's"))


def _continues(row: Row, parent: Row | None) -> bool:
    """Whether the prompt begins with the stated number of tokens of its parent's prompt and completion."""
    shared, prompt = row.get("prompt_shared_count") or 0, row["prompt_token_ids"]
    if not shared or prompt is None:
        return True
    if parent is None or parent["prompt_token_ids"] is None:
        return False
    before = parent["prompt_token_ids"]
    known = before[:shared] + (parent["completion_token_ids"] or [])[: max(0, shared - len(before))]
    return shared == len(known) and bool(prompt[:shared] == known)


def _is_digest_of(digest: str | None, text: str | None) -> bool:
    """Whether the digest is the text's; True if either is missing."""
    return not digest or text is None or hashlib.sha256(text.encode()).hexdigest() == digest


def _index(row: Row) -> int:
    index: int = row["chain_index"]
    return index
