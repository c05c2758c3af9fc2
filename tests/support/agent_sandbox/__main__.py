"""Runs the stand-in until its standard input ends: `python -m tests.support.agent_sandbox FOLDER`.

It applies the objects that `python -m penstock_sandbox.backends.kubernetes` prints, and two more warm pools.
The first line on standard output is JSON with the kubeconfig and the directory of the service's keys.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web
from tests.support.agent_sandbox.api import Api
from tests.support.agent_sandbox.controller import Controller
from tests.support.agent_sandbox.store import Store

from penstock_sandbox.backends.kubernetes.manifests import Choices, manifests

NAMESPACE = "sandboxes"
POOL, OPEN_POOL, COLD_POOL = "penstock", "open", "cold"


def apply(store: Store, controller: Controller, items: list[dict[str, Any]], keys: Path) -> list[dict[str, Any]]:
    """Puts the printed objects where they belong; returns the Role's rules."""
    plurals = {"SandboxTemplate": "sandboxtemplates", "SandboxWarmPool": "sandboxwarmpools"}
    rules: list[dict[str, Any]] = []
    for one in items:
        if one["kind"] in plurals:
            Api.check(plurals[one["kind"]], one)
            store.create(plurals[one["kind"]], one)
        elif one["kind"] == "Role":
            rules = list(one["rules"])
        else:
            controller.objects[one["kind"], one["metadata"]["name"]] = one
    for name, text in controller.objects["Secret", f"{POOL}-service"]["stringData"].items():
        (keys / name).write_text(text)
        (keys / name).chmod(0o600)
    return rules


def _further_pools(store: Store) -> None:
    """A pool without warm pods, and one whose template lets sandboxes out, as the default does."""
    template, pool = store.get("sandboxtemplates", POOL), store.get("sandboxwarmpools", POOL)
    assert template is not None and pool is not None
    pool["metadata"], pool["spec"]["replicas"] = {"name": COLD_POOL}, 0
    store.create("sandboxwarmpools", copy.deepcopy(pool))
    template["metadata"], pool["metadata"] = {"name": OPEN_POOL}, {"name": OPEN_POOL}
    del template["spec"]["networkPolicy"]
    pool["spec"]["sandboxTemplateRef"] = {"name": OPEN_POOL}
    store.create("sandboxtemplates", copy.deepcopy(template))
    store.create("sandboxwarmpools", copy.deepcopy(pool))


async def serve(folder: Path) -> None:
    """Serve until standard input ends."""
    store = Store()
    controller = Controller(store, folder / "pods")
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    rules = apply(store, controller, list(manifests(Choices(POOL, NAMESPACE))["items"]), keys)
    _further_pools(store)
    api = Api(store, controller, NAMESPACE, rules)
    runner = web.AppRunner(api.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (_, secure), (_, plain) = (address[:2] for address in runner.addresses)
    config = folder / "kubeconfig"
    config.write_text(json.dumps(api.kubeconfig(f"https://127.0.0.1:{secure}", authority.cert_pem.bytes())))
    controller.start()
    told = {"kubeconfig": str(config), "keys": str(keys), "control": f"http://127.0.0.1:{plain}"}
    try:
        print(json.dumps(told), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await controller.aclose()
        await runner.cleanup()


def main() -> None:
    """Entry point."""
    if sys.version_info < (3, 12):
        # A thread for each child's end, the default before 3.12, and forking do not go together.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    with tempfile.TemporaryDirectory(prefix="penstock-pods-", ignore_cleanup_errors=True) as folder:
        asyncio.run(serve(Path(folder)))


if __name__ == "__main__":
    main()
