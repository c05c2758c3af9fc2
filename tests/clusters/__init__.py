"""Real cluster managers on namespaces of this machine, and rollouts on the services that they launch.

`python -m tests.clusters --help` says how.
"""
