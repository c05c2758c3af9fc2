"""Several engines behind one service: each in its own process, all behind one pool that is itself an engine.

Invariants:

- A request gets one consistent answer: no replica contradicts what the caller has already received.
- New requests are answered by the version in force, on every replica: an update is in force on all or on none.
- A replica that starts or restarts has the weights, adapters, pause and sleep in force before it gets a request.
"""
