"""The API server's wire, and the control of faults: see the package.

/control, for tests: GET requests, claims; POST faults ([{"match": "POST sandboxclaims", "times": 1, "status": 429,
"headers": {}, "after": true}]: `after` lets the request take effect, `drop` cuts the connection); PUT behaviour
(attributes of the controller); PATCH PLURAL/NAME, as an operator's merge patch; POST compact, cut,
rotate (a new token; the old one is refused), fail/NAME, replace/NAME, delete/NAME.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jsonschema
from aiohttp import web
from tests.support.agent_sandbox.controller import Controller
from tests.support.agent_sandbox.schemas import SCHEMAS
from tests.support.agent_sandbox.store import Object, Store

_GROUPS = {
    "sandboxclaims": "extensions.agents.x-k8s.io",
    "sandboxwarmpools": "extensions.agents.x-k8s.io",
    "sandboxtemplates": "extensions.agents.x-k8s.io",
    "sandboxes": "agents.x-k8s.io",
    "pods": "",
}
_READ = {True: "watch", False: "list"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A Status object with this code and reason."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class Api:
    """See the module. `rules` are a Role's, and all that the one account may do."""

    def __init__(
        self, store: Store, controller: Controller, namespace: str, rules: Sequence[Mapping[str, Any]]
    ) -> None:
        self._store = store
        self._controller = controller
        self._namespace = namespace
        self._rules = rules
        self._token = secrets.token_urlsafe(24)
        self._requests: list[dict[str, Any]] = []
        self._faults: list[dict[str, Any]] = []

    def kubeconfig(self, server: str, ca: bytes) -> Object:
        """What leads a client here."""
        cluster = {"server": server, "certificate-authority-data": base64.b64encode(ca).decode()}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "stand-in", "cluster": cluster}],
            "users": [{"name": "service", "user": {"token": self._token}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "service"}}],
        }

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(middlewares=[self._around])
        many = "/apis/{group}/v1beta1/namespaces/{namespace}/{plural}"
        app.add_routes(
            [
                web.get(many, self._list),
                web.post(many, self._create),
                web.get(many + "/{name}", self._get),
                web.patch(many + "/{name}", self._patch),
                web.delete(many + "/{name}", self._delete),
                web.get("/api/v1/namespaces/{namespace}/pods", self._pods),
                web.get("/control/requests", self._told),
                web.get("/control/claims", self._claims),
                web.post("/control/faults", self._break),
                web.put("/control/behaviour", self._behave),
                web.patch("/control/{plural}/{name}", self._patch),
                web.post("/control/{what}", self._do),
                web.post("/control/{what}/{name}", self._do),
            ]
        )
        return app

    # Every request -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/control/") and request.scheme == "http":
            return await handler(request)
        plural = request.match_info.get("plural", "pods")
        watches = request.query.get("watch", "").lower() == "true"
        what = f"{'WATCH' if watches else request.method} {plural}"
        fault = next((one for one in self._faults if what.startswith(one["match"]) and one["times"] > 0), None)
        if fault is not None:
            fault["times"] -= 1
            if not fault.get("after"):
                return _broken(request, fault)
        try:
            if request.headers.get("Authorization") != f"Bearer {self._token}" or request.scheme != "https":
                raise Refused(401, "Unauthorized", "Unauthorized")
            self._allowed(request, plural, watches=watches)
            body = await request.json() if request.can_read_body else None
            self._requests.append({"what": what, "path": request.path, "query": dict(request.query), "body": body})
            answer = await handler(request)
        except Refused as refused:
            return web.json_response(_status(refused.code, refused.reason, str(refused)), status=refused.code)
        return _broken(request, fault) if fault is not None else answer

    def _allowed(self, request: web.Request, plural: str, *, watches: bool) -> None:
        verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
        verb = verbs.get(request.method) or ("get" if "name" in request.match_info else _READ[watches])
        group = request.match_info.get("group", "")
        if plural not in _GROUPS or group != _GROUPS[plural]:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if request.match_info["namespace"] != self._namespace or not any(
            group in rule["apiGroups"] and plural in rule["resources"] and verb in rule["verbs"] for rule in self._rules
        ):
            raise Refused(403, "Forbidden", f'{plural} is forbidden: User "service" cannot {verb} resource "{plural}"')

    @staticmethod
    def check(plural: str, sent: Object) -> None:
        """Raises Refused for what the CRD does not know."""
        try:
            jsonschema.validate(sent, SCHEMAS[plural], format_checker=jsonschema.FormatChecker())
        except jsonschema.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            raise Refused(422, "Invalid", f"{where}: {error.message}") from None

    # Objects -----------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        plural, sent = request.match_info["plural"], await request.json()
        self.check(plural, sent)
        try:
            made = self._store.create(plural, sent)
        except KeyError:
            message = f'{plural} "{sent["metadata"]["name"]}" already exists'
            raise Refused(409, "AlreadyExists", message) from None
        self._controller.changed()
        return web.json_response(made, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(request))

    def _found(self, request: web.Request) -> Object:
        plural, name = request.match_info["plural"], request.match_info["name"]
        found = self._store.get(plural, name)
        if found is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return found

    async def _patch(self, request: web.Request) -> web.Response:
        if request.content_type != "application/merge-patch+json":
            raise Refused(415, "UnsupportedMediaType", request.content_type)
        before, sent = self._found(request), await request.json()
        merged = _merged(before, sent)
        own = ("name", "namespace", "labels", "annotations")
        bare = {name: merged[name] for name in ("apiVersion", "kind", "spec")}
        self.check(
            request.match_info["plural"],
            {**bare, "metadata": {name: merged["metadata"][name] for name in own if name in merged["metadata"]}},
        )
        changed = self._store.change(
            request.match_info["plural"], before["metadata"]["name"], lambda one: one.update(spec=merged["spec"])
        )
        return web.json_response(changed)

    async def _delete(self, request: web.Request) -> web.Response:
        found = self._found(request)
        policy = request.query.get("propagationPolicy", "Background")
        self._controller.delete(found["metadata"]["name"], foreground=policy == "Foreground")
        return web.json_response(found)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        plural = request.match_info["plural"]
        wanted = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request, plural, wanted)
        found = [one for one in self._store.all(plural) if _matches(one, wanted)]
        after = request.query.get("continue", "")
        limit = int(request.query.get("limit") or len(found) or 1)
        left = [one for one in found if one["metadata"]["name"] > after]
        metadata = {"resourceVersion": str(self._store.version)}
        if len(left) > limit:
            metadata["continue"] = left[limit - 1]["metadata"]["name"]
        return web.json_response({"kind": "List", "metadata": metadata, "items": left[:limit]})

    async def _watch(self, request: web.Request, plural: str, wanted: Mapping[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "1800"))):
                async for change in self._store.changes(plural, int(request.query["resourceVersion"])):
                    if change is not None and _matches(change.object, wanted):
                        await response.write(_line(change.kind, change.object))
                    elif change is None and request.query.get("allowWatchBookmarks", "").lower() == "true":
                        bookmark = {"kind": "SandboxClaim", "metadata": {"resourceVersion": str(self._store.version)}}
                        await response.write(_line("BOOKMARK", bookmark))
        except LookupError:
            message = "too old resource version"
            await response.write(_line("ERROR", _status(410, "Expired", message)))
        except TimeoutError:
            pass  # as asked
        return response

    async def _pods(self, request: web.Request) -> web.Response:
        wanted = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)
        found = [one for one in self._controller.pods() if _matches(one, wanted)]
        listed = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": found}
        return web.json_response(listed)

    # For tests ---------------------------------------------------------------------------------------------------

    async def _told(self, _: web.Request) -> web.Response:
        return web.json_response(self._requests)

    async def _claims(self, _: web.Request) -> web.Response:
        return web.json_response(self._store.all("sandboxclaims"))

    async def _break(self, request: web.Request) -> web.Response:
        self._faults = await request.json()
        return web.json_response({})

    async def _behave(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            setattr(self._controller, name, value)
        self._controller.changed()
        return web.json_response({})

    async def _do(self, request: web.Request) -> web.Response:
        what, name = request.match_info["what"], request.match_info.get("name", "")
        told: dict[str, Any] = {}
        if what == "compact":
            self._store.compact()
        elif what == "cut":
            told["cut"] = self._controller.cut()
        elif what == "rotate":
            told["token"] = self._token = secrets.token_urlsafe(24)
        elif what == "fail":
            await self._controller.fail(name)
        elif what == "replace":
            await self._controller.replace(name)
        elif what == "delete":
            self._controller.delete(name, foreground=True)
        else:
            raise web.HTTPNotFound
        return web.json_response(told)


def _broken(request: web.Request, fault: Mapping[str, Any]) -> web.Response:
    if fault.get("drop"):
        assert request.transport is not None
        request.transport.abort()
    body = fault.get("body", json.dumps(_status(fault.get("status", 500), "Fault", "made by a test")))
    return web.Response(status=fault.get("status", 500), text=body, headers=fault.get("headers", {}))


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _line(kind: str, told: Object) -> bytes:
    return json.dumps({"type": kind, "object": told}).encode() + b"\n"


def _matches(one: Object, wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= (one["metadata"].get("labels") or {}).items()


def _merged(before: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged
