"""The sandbox service: lifecycle of sandboxes on pluggable backends, the processes and files in them, leases and forks.

Invariants: the domain modules know no proto and no gRPC (only ``rpc`` and ``app`` do), nothing here knows of agents or
models, and this file stays empty of imports because the spawner, which must fork fast, imports the package.
"""
