"""Verifies exported trajectories against the hash chains of their rollouts, offline (docs/trajectories.md has the
bytes).

The gate extends a rollout's chain with each call that it delivers, and the chain can be recomputed from the rows: a
changed token, logprob, version or sampling setting, or a call left out, added or moved, shows at once. Data derived
from calls (samples, masks, weights) is derived again, and each row's digest reveals any other change. This proves that
rows are what the gate recorded, not that the gate was honest.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Final

import numpy as np

from penstock.analysis.verify_replays import Key, check_replay, key_of, origin_of
from penstock.analysis.verify_rows import (
    KeptRows,
    Problem,
    Proof,
    checked_origins,
    has_its_rows,
    keep_checked,
    together,
    unlike,
)
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

    Memory holds one rollout's rows, some 1 KB for each rollout and each call that is compared with its origin, 8 bytes
    for each row, and the problems. A rollout's rows take 4 bytes for each token of each prompt, and some 50 for each of
    completions and samples, without alternatives. All rows wait in temporary files until those of their rollout are
    there, since they may be scattered: the files have about the size of the rows as JSON Lines, in `TMPDIR`.

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
        ConfigurationError: `FILE_NOT_WRITTEN`, the disk for temporary files is full.
    """
    proof, named, replaying = Proof(), set[Key](), list[str]()
    with ExitStack() as held:
        kept: dict[Table, KeptRows[str]] = {}
        for table, given in ((Table.TURNS, turns), (Table.SEQUENCES, sequences), (Table.TOOL_CALLS, tool_calls)):
            kept[table] = held.enter_context(KeptRows(table))
            keep_checked(given, table, proof, kept[table])
        proof.rollouts = len(kept[Table.TURNS])
        proof.samples, proof.tool_calls = kept[Table.SEQUENCES].total, kept[Table.TOOL_CALLS].total
        for rollout_id in dict.fromkeys(key for one in kept.values() for key in one):
            rows = {table: one.rows(rollout_id) for table, one in kept.items()}
            _check_rollout(rollout_id, rows, proof)
            origins = {key for row in rows[Table.TURNS] if (key := origin_of(row)) is not None}
            if origins and against is not None:
                named |= origins
                replaying.append(rollout_id)
        if against is not None:
            with KeptRows[Key](Table.TURNS) as found:
                for row in checked_origins(against, proof):
                    if key_of(row) in named:
                        found.add(key_of(row), row)
                for rollout_id in replaying:
                    _check_replays(rollout_id, kept[Table.TURNS].rows(rollout_id), found, proof)
    return proof


def _check_rollout(rollout_id: str, tables: Mapping[Table, list[Row]], proof: Proof) -> None:
    """Checks one rollout's rows of all tables."""
    found = proof.problems
    for table, rows in tables.items():
        found += [Problem(rollout_id, "", message) for message in together(rows, table)]
    turns, samples = tables[Table.TURNS], tables[Table.SEQUENCES]
    if turns:
        _check_chain(rollout_id, turns, proof)
        _check_calls(rollout_id, turns, proof)
        found += [Problem(rollout_id, "", message) for message in check_policies(turns, samples)]
        found += [
            Problem(rollout_id, "", f"its rows of {table} and turns differ in {name}")
            for table, rows in tables.items()
            if table is not Table.TURNS and rows
            for name in unlike(rows[0], turns[0])
        ]
    found += [
        Problem(rollout_id, "", f"sample {row['sample_id']}: its tensors differ from their digests")
        for row in samples
        if not has_its_rows(row.get("tensors"))
    ]
    found += [Problem(rollout_id, *one) for one in check_samples(samples, {row["call_id"]: row for row in turns})]
    found += [
        Problem(rollout_id, "", f"tool call {row['tool_call_id']}: another result")
        for row in tables[Table.TOOL_CALLS]
        if not _is_digest_of(row["result_sha256"], row["result_json"])
    ]


def _check_replays(rollout_id: str, rows: list[Row], origins: KeptRows[Key], proof: Proof) -> None:
    for row in rows:
        origin = origin_of(row)
        if origin is None:
            continue
        found = check_replay(row, origins.last(origin))
        if found is None:
            proof.unproven_replays += 1
            continue
        proof.replayed += 1
        proof.problems += [Problem(rollout_id, row["call_id"], message) for message in found]


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
    known = before[:shared] + (parent["completion_token_ids"] or before[:0])[: max(0, shared - len(before))]
    return shared == len(known) and bool(prompt[:shared] == known)


def _is_digest_of(digest: str | None, text: str | None) -> bool:
    """Whether the digest is the text's; True if either is missing."""
    return not digest or text is None or hashlib.sha256(text.encode()).hexdigest() == digest


def _index(row: Row) -> int:
    index: int = row["chain_index"]
    return index
