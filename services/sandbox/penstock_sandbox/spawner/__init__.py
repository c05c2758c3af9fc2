"""The spawner: a small single-threaded process that makes sandboxes, and one door process into each of them.

Purpose: the gRPC service must never fork itself (threads, a large heap), and nothing of ours may run where an agent can
touch it. So the service starts one spawner; the spawner forks bubblewrap for every sandbox and, beside it, a *door*: a
process that entered the sandbox's namespaces (all but its process namespace, so that the agent cannot see or signal
it) as the sandbox's own user. The service speaks to each door over its own socket pair; the door starts processes,
opens files and the endpoint's listener, and hands the descriptors back.

Invariants: standard library only, imported by ``python -I -S``; no thread; every death takes its dependants along
(service -> spawner -> doors and sandboxes).
"""
