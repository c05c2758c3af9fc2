"""Adds annotations to the trajectories of ended rollouts: what judges outside the environment say about them.

Invariants: all of a request are added or none is. What is there is about calls and tokens of the trajectory, and has
finite numbers. An annotation changes no reward and no capture: it is in the driver's journal alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.json_format import MessageToJson

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import times
from penstock_chassis.errors import NotFound, ResourceExhausted
from penstock_chassis.validation import invalid_field
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Record
from penstock_driver.domain.validation import Violations, check_nesting
from penstock_driver.store.annotations import Annotations, Key, digest_of
from penstock_driver.trajectories.reading import without_tokens

MOST: Final = 1024
MOST_BYTES: Final = 64 << 20
"""Annotations of one trajectory, and bytes of all of them."""
MAX_NAME: Final = 128
MAX_DETAILS_BYTES: Final = 64 << 10
MOST_ASKED: Final = 64
"""Requests at once, each with its annotations in memory."""
_LONGEST: Final = 8
"""How many times longer a Struct may be than the same as JSON: a digit and a comma are eleven bytes."""
_READINGS: Final = 8
"""Requests that read their trajectory at once."""
_SMALL_BYTES: Final = 256 << 10
_FLOAT_BYTES: Final = 4
_EXPONENT: Final = bytes(255 if byte & 0x7F == 0x7F else 0 for byte in range(256))
_ITS_LAST_BIT: Final = bytes(255 if byte & 0x80 else 0 for byte in range(256))


class Annotator:
    """Annotates ended rollouts."""

    def __init__(self, annotations: Annotations, captures: Captures) -> None:
        self._annotations = annotations
        self._captures = captures
        self._reading = asyncio.Semaphore(_READINGS)
        self._adding = asyncio.Lock()
        """Held while a rollout's annotations are counted and written."""
        self._asked = 0

    async def annotate(self, record: Record, given: Sequence[trajectory_pb2.Annotation]) -> None:
        """Add them to an ended rollout; return once they are on disk.

        InvalidArgument (FIELD_INVALID); NotFound (CALL_UNKNOWN; ROLLOUT_UNKNOWN: it was deleted meanwhile);
        FailedPrecondition (TRAJECTORY_ABSENT); ResourceExhausted (ANNOTATION_LIMIT).
        """
        if self._asked >= MOST_ASKED:
            message = f"{self._asked} requests for annotations are not answered yet: try again later"
            raise ResourceExhausted(message, reason="ANNOTATION_LIMIT", retry_after_s=1.0)
        self._asked += 1
        try:
            # Half a million numbers of details take a second to check, in which all rollouts would wait.
            if sum(one.ByteSize() for one in given) <= _SMALL_BYTES:
                digests = _checked(given)
            else:
                digests = await asyncio.to_thread(_checked, given)
            async with self._reading:
                _check_against(await without_tokens(self._captures, record), given)
            async with self._adding:
                await self._add(record, given, digests)
        finally:
            self._asked -= 1

    async def _add(self, record: Record, given: Sequence[trajectory_pb2.Annotation], digests: Sequence[bytes]) -> None:
        known = await self._annotations.known(record.rollout_id)
        now, added = times.timestamp(time.time()), dict[bytes, trajectory_pb2.Annotation]()
        sizes = {key: one.size for key, one in known.items()}
        for one, digest in zip(given, digests, strict=True):
            key = Key.of(one)
            if key in known and known[key].digest == digest:
                continue
            made = trajectory_pb2.Annotation()
            made.CopyFrom(one)
            made.create_time.CopyFrom(now)
            sizes[key] = made.ByteSize()
            added[digest] = made
        if not added:
            return
        _check_room(sizes)
        await self._annotations.put(record, added)


def _checked(given: Sequence[trajectory_pb2.Annotation]) -> Sequence[bytes]:
    """Returns the annotations' digests. Raises as `_check`."""
    _check(given)
    return [digest_of(one) for one in given]


def _check(given: Sequence[trajectory_pb2.Annotation]) -> None:
    """Check what can be checked without the trajectory. InvalidArgument with every wrong field."""
    if not 1 <= len(given) <= MOST:
        raise invalid_field("annotations", f"expected 1 to {MOST}")
    found, first = Violations(), dict[Key, int]()
    for index, one in enumerate(given):
        where = f"annotations[{index}]"
        for field, text in (("name", one.name), ("author", one.author)):
            if not 1 <= len(text) <= MAX_NAME or not text.isprintable():
                found.add(f"{where}.{field}", f"expected 1 to {MAX_NAME} printable characters")
        if one.HasField("call_id") and not one.call_id:
            found.add(f"{where}.call_id", "is empty: leave it unset for the whole trajectory")
        if one.HasField("value") and not math.isfinite(one.value):
            found.add(f"{where}.value", "is not finite")
        if not one.HasField("value") and not one.token_values and not one.HasField("details"):
            found.add(f"{where}.value", "is required, or token_values or details: it would say nothing")
        if one.HasField("create_time"):
            found.add(f"{where}.create_time", "is set by the driver: leave it unset")
        _check_token_values(one, where, found)
        _check_details(one, where, found)
        if (earlier := first.setdefault(Key.of(one), index)) != index:
            found.add(where, f"has the name, author and call of annotations[{earlier}]")
    found.refuse()


def _check_token_values(one: trajectory_pb2.Annotation, where: str, found: Violations) -> None:
    if not one.token_values:
        return
    if not one.call_id:
        found.add(f"{where}.token_values", "needs call_id: they are of the tokens that one call sampled")
    if len(one.token_values) % _FLOAT_BYTES:
        found.add(f"{where}.token_values", "is not a whole number of float32")
    elif not _all_finite(one.token_values):
        found.add(f"{where}.token_values", "has a number that is not finite")


def _check_details(one: trajectory_pb2.Annotation, where: str, found: Violations) -> None:
    if one.details.ByteSize() > _LONGEST * MAX_DETAILS_BYTES:
        found.add(f"{where}.details", f"at most {MAX_DETAILS_BYTES} bytes as JSON")
        return
    before = len(found.found)
    check_nesting(one.details, f"{where}.details", found)
    if len(found.found) > before:
        return
    try:
        size = len(MessageToJson(one.details, indent=None, ensure_ascii=False).encode())
    except ValueError:
        found.add(f"{where}.details", "has a value that JSON has not, such as a number that is not finite")
        return
    if size > MAX_DETAILS_BYTES:
        found.add(f"{where}.details", f"is {size} bytes as JSON; at most {MAX_DETAILS_BYTES} are allowed")


def _check_against(trajectory: trajectory_pb2.Trajectory, given: Sequence[trajectory_pb2.Annotation]) -> None:
    """Check that what they are about is there. InvalidArgument with every wrong field; NotFound (CALL_UNKNOWN)."""
    counts = {call.call_id: call.completion.span.count for call in trajectory.calls}
    found = Violations()
    for index, one in enumerate(given):
        if one.call_id and one.call_id not in counts:
            message = f"annotations[{index}].call_id: rollout {trajectory.rollout_id} has no call {one.call_id[:128]}"
            raise NotFound(message, reason="CALL_UNKNOWN")
        if one.chain_sha256 and one.chain_sha256 != trajectory.chain_sha256:
            is_chain = f"the rollout's is {trajectory.chain_sha256.hex()}"
            found.add(f"annotations[{index}].chain_sha256", f"is that of another trajectory: {is_chain}")
        if one.token_values and (values := len(one.token_values) // _FLOAT_BYTES) != counts[one.call_id]:
            sampled = f"the call sampled {counts[one.call_id]} tokens"
            found.add(f"annotations[{index}].token_values", f"has {values} numbers: {sampled}")
    found.refuse()


def _check_room(sizes: Mapping[Key, int]) -> None:
    """ResourceExhausted (ANNOTATION_LIMIT)."""
    if len(sizes) > MOST:
        message = f"the trajectory would have {len(sizes)} annotations; at most {MOST} are allowed"
        raise ResourceExhausted(message, reason="ANNOTATION_LIMIT")
    if (total := sum(sizes.values())) > MOST_BYTES:
        message = f"the trajectory would have {total} bytes of annotations; at most {MOST_BYTES} are allowed"
        raise ResourceExhausted(message, reason="ANNOTATION_LIMIT")


def _all_finite(floats: bytes) -> bool:
    """Whether each little-endian float32 is: not all bits of its exponent are set. Fast, as there may be 2**24."""
    high = int.from_bytes(floats[3::_FLOAT_BYTES].translate(_EXPONENT), "big")
    low = int.from_bytes(floats[2::_FLOAT_BYTES].translate(_ITS_LAST_BIT), "big")
    return not high & low
