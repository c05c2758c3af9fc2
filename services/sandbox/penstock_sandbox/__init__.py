"""The sandbox service: lifecycle of sandboxes on pluggable backends, the processes and files in them, leases and forks.

Invariants: only ``rpc``, ``app`` and the policy of ``sandboxes`` know protos, only the first two gRPC; nothing here
knows agents or models; this file has no imports because the spawner, which must fork fast, imports the package.
"""
