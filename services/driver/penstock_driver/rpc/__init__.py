"""The driver's gRPC servicers, and the translation of protos."""
