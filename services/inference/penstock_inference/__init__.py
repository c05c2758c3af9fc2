"""The inference service: tokens in, tokens and logprobs out; weights and versions."""
