"""Retry de-duplication: recognises requests that repeat a call (R34).

An SDK that loses its connection, or gets a retriable error, repeats its request. One generation must stay one turn:

1. A request with an `Idempotency-Key` joins the call with that key, or gets its answer again. The same key with
   another body or for another model is refused.
2. A request marked as a retry (`x-stainless-retry-count` above 0) repeats the last call with the same body.
3. Any other request joins a call with the same body if no client can be waiting for it: an open call without
   connections, or an answered call whose answer was not fully received before its connection ended. An answer still
   being written to an open connection belongs to that connection.
4. A verifier that asks its judge, and a user that asks its model, gets the answer that a known body had: it may have
   been started again.
5. Everything else is a new call, even with a known body: an agent may ask the same thing twice.

Bodies are the same if their dialect's `essence` is the same: a client may serialise one request in several ways. Where
the path names the model, the same body for another model is another request.

A call that ended without an answer is never joined: a retry of it is a new call. So is a retry of a new call that was
refused: from the refusal on, no call is known by that key or body (`Interceptor.begin`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock_codec.fast_dataclass import quick
from penstock_interception.cache import sha256
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.ingress.dialects.base import BadRequest, DialectCodec

MAX_KEY = 256


@quick
@dataclass(frozen=True, slots=True)
class Identity:
    """The features that identify a repeated request. `model` is the one in the path; "" where the body names it."""

    retry_key: str
    body_sha256: bytes
    by_key: bool
    says_retry: bool
    model: str = ""


def identify(dialect: DialectCodec, headers: Mapping[str, str], body: bytes, model: str = "") -> Identity:
    """Returns a request's identity; `model` is the one in its path, if any.

    Raises BadRequest for a key that is too long.
    """
    digest = sha256(body)
    essence = dialect.essence(body)
    same = digest if essence is None else sha256(essence)
    name = dialect.dialect
    count = headers.get("x-stainless-retry-count", "0")
    says_retry = count.isdigit() and count.strip("0") != ""
    key = headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        raise BadRequest(f"Idempotency-Key is longer than {MAX_KEY} characters.", None, "invalid_idempotency_key")
    if key:
        return Identity(f"key:{name}:{key}", digest, True, says_retry, model)
    retry_key = f"body:{name}:{same.hex()}"
    return Identity(f"{retry_key}:{model}" if model else retry_key, digest, False, says_retry, model)


def same_call(rollout: Rollout, identity: Identity, is_taken: Callable[[str], bool]) -> Call | None:
    """Returns the call that a request repeats, or None. Raises BadRequest for a key of another body or model.

    `is_taken` returns whether a client on an open connection gets an answered call's answer.
    """
    call = rollout.by_retry_key.get(identity.retry_key)
    if call is None:
        return None
    if identity.by_key and call.request.body_sha256 != identity.body_sha256:
        raise BadRequest("This Idempotency-Key was used with another body.", None, "idempotency_key_reused")
    if identity.by_key and identity.model and call.request.model_requested != identity.model:
        raise BadRequest("This Idempotency-Key was used with another model.", None, "idempotency_key_reused")
    if call.state.terminal and call.state is not CallState.DELIVERED:
        return None
    if identity.by_key or identity.says_retry or rollout.spec.belongs_to:
        return call
    if not call.state.terminal:
        return call if call.attached <= 0 else None
    return None if call.answer_sent or is_taken(call.id) else call
