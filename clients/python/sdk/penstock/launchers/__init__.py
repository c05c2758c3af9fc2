"""Stacks whose sandbox services are on many machines, which a cluster manager (Ray, Slurm, Kubernetes) provides."""

from penstock.launchers.stack import Stack as Stack
