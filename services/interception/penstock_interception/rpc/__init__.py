"""What speaks gRPC: the two servicers, the client of the inference service, and the translation of values."""
