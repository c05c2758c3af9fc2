"""The gRPC servicer: the only package here that knows protos."""
