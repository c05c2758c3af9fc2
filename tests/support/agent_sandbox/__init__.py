"""A stand-in of a cluster with kubernetes-sigs/agent-sandbox, for the unmodified client to talk to; its pods are real.

`store.py` keeps objects as an API server does, with versions and an event log that can be compacted. `api.py` is the
wire: TLS, a bearer token, lists in pages, watches with bookmarks, merge patches, deletions in the foreground, Status
objects. `controller.py` does what agent-sandbox's controllers and the kubelet do. `schemas.py` has the parts of the
CRDs (v1beta1, of release 0.5.6) that may be used. A pod is a process in namespaces of its own (the machine of
`tests/support/hf_jobs`), with the template's command, environment and volumes; its address is one of the loopback's.

It is stricter than a real one: a field that the schema does not know is refused, where a real API server drops it; what
the printed Role does not allow is refused; `python -m penstock_sandbox.backends.kubernetes` makes the template, so the
manifests of the guide are what runs.

What it does NOT show of a real cluster
- The kubelet, container runtimes, images (every image is this host's programs), cgroups: no limits of memory or CPU.
- The network plugin: pods have no network but the way in that the relay makes, so an enforced NetworkPolicy is assumed,
  not shown; the stand-in does not read the policy.
- The controllers' own timing and conflicts: adoption, replenishing and deletion follow their source as read.
- Webhooks that convert versions, API priority and fairness (429 is made on demand), etcd's limits.
"""
