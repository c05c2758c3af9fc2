"""The inference service: tokens in, tokens and logprobs out; weights, policy versions, pause and resume.

It knows no rollout, no agent and no text protocol. `engines` holds what computes; `service` is the only module that
speaks gRPC.
"""
