"""Machines for Ray's own autoscaler: what it asks for is written into a folder, from which the harness starts it.

Ray imports `Machines` in its autoscaler's process on the head (`provider: {type: external}`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_HEAD,
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

_UNUSED: Final = {
    "auth": {},
    "docker": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    "cluster_synced_files": [],
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "upscaling_speed": 1.0,
}
"""What a configuration must have although nothing is copied to machines or run there."""
HEAD_TYPE: Final = "head"
WORKER_TYPE: Final = "worker"


def configured(
    folder: Path, addresses: Mapping[str, str], head: str, resources: Mapping[str, float], there: Sequence[str]
) -> dict[str, Any]:
    """The autoscaler's configuration, whose files are in `folder`.

    `addresses` of all machines by name; `resources` of each but the head; `there` are those that are started already.
    """
    folder.mkdir()
    for name in there:
        _write(folder, name, {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: WORKER_TYPE})
    workers = len(addresses) - 1
    provider = {
        "type": "external",
        "module": f"{__name__}.{Machines.__name__}",
        "folder": str(folder),
        "addresses": dict(addresses),
        "head": head,
        # The harness starts Ray on a machine; nobody logs in there.
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "foreground_node_launch": True,
        "worker_liveness_check": False,
    }
    return {
        **copy.deepcopy(_UNUSED),
        "cluster_name": "test",
        "max_workers": workers,
        "idle_timeout_minutes": 60,
        "provider": provider,
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {"resources": {}, "node_config": {}, "max_workers": 0},
            WORKER_TYPE: {
                "resources": dict(resources),
                "node_config": {},
                "min_workers": 0,
                "max_workers": workers,
            },
        },
    }


def asked(folder: Path) -> list[str]:
    """The machines that the autoscaler has asked for, in the order of their names."""
    return sorted(path.name for path in folder.iterdir() if not path.suffix)


class Machines(NodeProvider):  # type: ignore[misc]
    """Each machine that was asked for is a file with its tags."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
        self._addresses: Mapping[str, str] = provider_config["addresses"]
        self._head = provider_config["head"]

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """See NodeProvider."""
        there = [self._head, *asked(self._folder)]
        return [name for name in there if tag_filters.items() <= self.node_tags(name).items()]

    def is_running(self, node_id: str) -> bool:
        """See NodeProvider."""
        return node_id == self._head or node_id in asked(self._folder)

    def is_terminated(self, node_id: str) -> bool:
        """See NodeProvider."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """See NodeProvider."""
        if node_id == self._head:
            return {
                TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
                TAG_RAY_USER_NODE_TYPE: HEAD_TYPE,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
        tags: dict[str, str] = json.loads((self._folder / node_id).read_text())
        return tags

    def internal_ip(self, node_id: str) -> str:
        """See NodeProvider."""
        return self._addresses[node_id]

    def external_ip(self, node_id: str) -> str:
        """See NodeProvider."""
        return self._addresses[node_id]

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """See NodeProvider."""
        free = sorted(self._addresses.keys() - {self._head, *asked(self._folder)})
        for name in free[:count]:
            _write(self._folder, name, tags)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """See NodeProvider."""
        if node_id != self._head:
            _write(self._folder, node_id, {**self.node_tags(node_id), **tags})

    def terminate_node(self, node_id: str) -> None:
        """See NodeProvider."""
        (self._folder / node_id).unlink(missing_ok=True)

    def terminate_nodes(self, node_ids: Sequence[str]) -> None:
        """See NodeProvider."""
        for name in node_ids:
            self.terminate_node(name)


def _write(folder: Path, name: str, tags: Mapping[str, str]) -> None:
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps({**tags, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE}))
    partial.replace(folder / name)
