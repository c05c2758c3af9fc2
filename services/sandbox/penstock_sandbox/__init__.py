"""The sandbox service: lifecycle of sandboxes on pluggable backends, the processes and files in them, leases and forks.

Invariants: only ``rpc`` knows proto and gRPC; nothing here knows agents or models; this file has no imports because
the spawner, which must fork fast, imports the package.
"""
