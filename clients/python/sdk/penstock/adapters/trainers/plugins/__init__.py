"""Plug-ins that a trainer loads and runs: one module per trainer, which imports that trainer.

Each runs a rollout of an agent for what its trainer asks for. The agent's model calls are answered by the trainer's own
engine, by token ids, so that the weights that sample are those that it trains. docs/guides/trainers.md has an example
of each, and which version was run.
"""
