"""The images of rollouts: each is stored once by its digest, and deleted with its rollout.

An agent repeats its images with each call, in base64. A body is stored without them, and put together again, byte for
byte, where it is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.folded_bodies import FoldedBody, unfold
from penstock_interception.domain.state import Rollout

SCHEMA: Final = """
CREATE TABLE media (
    rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, sha256 BLOB NOT NULL, media_type TEXT NOT NULL,
    data BLOB NOT NULL, PRIMARY KEY (rollout_id, sha256)
) STRICT;
ALTER TABLE bodies ADD COLUMN cuts TEXT;
"""


class MediaStore:
    """Reads images. What is written of them is written with a call."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def read(self, rollout_id: str, digests: Collection[bytes]) -> dict[bytes, bytes]:
        """Returns the bytes of a rollout's images by digest; unknown ones are left out."""
        found: dict[bytes, bytes] = {}
        for digest in digests:
            rows = await self._journal.query(
                "SELECT data FROM media WHERE rollout_id = ? AND sha256 = ?", (rollout_id, digest)
            )
            found.update((digest, bytes(row["data"])) for row in rows)
        return found

    async def sizes(self, rollout_id: str) -> dict[bytes, int]:
        """Returns how many bytes each of a rollout's images has, by digest."""
        rows = await self._journal.query(
            "SELECT sha256, length(data) AS size FROM media WHERE rollout_id = ?", (rollout_id,)
        )
        return {bytes(row["sha256"]): row["size"] for row in rows}

    async def unfolded(self, rollout_id: str, body: bytes, cuts: str | None) -> bytes:
        """Returns a stored body as it was received."""
        if not cuts:
            return body
        places = [(at, bytes.fromhex(digest)) for at, digest in json.loads(cuts)]
        return unfold(body, places, await self.read(rollout_id, {digest for _, digest in places}))

    @staticmethod
    def adding(rollout: Rollout, folded: FoldedBody) -> list[Statement]:
        """Inserts the images that are not known to be written. One that two calls have at one time is written twice."""
        return [
            (
                "INSERT INTO media VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET media_type = excluded.media_type",
                (rollout.id, digest, media_type, data),
            )
            for digest, (media_type, data) in folded.images.items()
            if digest not in rollout.images
        ]


def cuts_to(folded: FoldedBody) -> str:
    """The cuts as they are stored."""
    return json.dumps([[at, digest.hex()] for at, digest in folded.cuts])
