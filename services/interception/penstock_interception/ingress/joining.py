"""Which requests are the same call again (R34).

An SDK that loses its connection, or gets an error that it may retry, sends its request again. One generation, one turn:

1. A request with an `Idempotency-Key` is the call with that key: it joins it, or gets its answer again. The same key
   with another body is refused.
2. A request that says that it is a retry (`x-stainless-retry-count` above 0) is the last call with the same body.
3. Any other request with the body of an open call whose connections are all gone, or of an answered call whose answer
   nobody took as a whole before its connection ended, is that call: nobody else can be waiting for it. An answer that
   is still to be written to a connection that stands is that connection's.
4. Everything else is a new call, also when its body was seen before: an agent may ask the same twice.

Bodies are the same when what the dialect calls their essence is: a client may write one request in several ways.

A call that ended without an answer is never joined: a retry of it is a new call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock_codec.quick import quick
from penstock_interception.calls import Call, CallState, Rollout
from penstock_interception.ingress.dialect import BadRequest, DialectCodec
from penstock_interception.prefix_digest import sha256

MAX_KEY = 256


@quick
@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a request recognisable."""

    retry_key: str
    body_sha256: bytes
    by_key: bool
    says_retry: bool


def identify(dialect: DialectCodec, headers: Mapping[str, str], body: bytes) -> Identity:
    """The identity of a request. Raises BadRequest for a key that is too long."""
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
        return Identity(f"key:{name}:{key}", digest, True, says_retry)
    return Identity(f"body:{name}:{same.hex()}", digest, False, says_retry)


def same_call(rollout: Rollout, identity: Identity, is_taken: Callable[[str], bool]) -> Call | None:
    """The call that a request repeats; None when it is new. Raises BadRequest for a key with another body.

    `is_taken` knows of an answered call whether somebody who waits on an open connection gets its answer.
    """
    call = rollout.by_retry_key.get(identity.retry_key)
    if call is None:
        return None
    if identity.by_key and call.arrival.body_sha256 != identity.body_sha256:
        raise BadRequest("This Idempotency-Key was used with another body.", None, "idempotency_key_reused")
    if call.state.terminal and call.state is not CallState.DELIVERED:
        return None
    if identity.by_key or identity.says_retry:
        return call
    if not call.state.terminal:
        return call if call.attached <= 0 else None
    return None if call.told or is_taken(call.id) else call
