"""A fleet of Penstock on one machine: each host is a network namespace, and hosts can be lost.

`python -m tests.hosts run --help` has the command. `network` makes the hosts, `fleet` the services on them, `model` a
policy whose answers depend on the prompt alone, `losses` takes hosts away, `run` drives rollouts and judges what came.
`growth`, `unevenness`, `draining` and `rolling` are scenarios of their own.
"""
