"""The spawner: a small single-threaded process that makes sandboxes, and a helper process for each of them.

Purpose: the gRPC service must never fork (threads, a large heap), and nothing of ours may run where an agent can touch
it. So the service starts one spawner, which forks for every sandbox a bubblewrap and a *sandbox helper*: a process in
the sandbox's namespaces (all but its process namespace, so that the agent can neither see nor signal it) that runs as
the sandbox's own user. The service has a socket pair to each helper; the helper starts processes, opens files and the
endpoint's listener, and passes the descriptors back.

A create, step by step:

1. The service makes the helper's socket pair and sends its end with bubblewrap's arguments to the spawner.
2. The spawner starts bubblewrap and forks the helper, which becomes the sandbox's user and waits.
3. The sandbox's first process writes a line: its root is complete. The spawner gives the helper that process's pidfd,
   which lets it in, moves both into the control groups, and replies to the service with their ids.
4. The helper enters the namespaces and sends ``ready`` to the service on its own channel, or ``failed`` with the error.
5. The service, which has waited for both, asks the helper for the endpoint's listener, if there is an endpoint.

If bubblewrap or the helper ends, the spawner kills the other; then it refuses the create if that is not answered yet,
and sends the event ``gone``, unless a destroy waits for the end.

Invariants: standard library only, imported by ``python -I -S``; no thread; each process's death ends its dependants
(service -> spawner -> helpers and sandboxes).
"""
