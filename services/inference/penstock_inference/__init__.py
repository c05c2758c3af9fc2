"""The inference service: token ids in, token ids and logprobs out; weights, policy versions, pause and resume.

It knows no rollout, no agent and no text protocol. `engines` computes; only `rpc` and `clients` know protos.
"""
