"""What speaks gRPC in the driver: the adapters to the other services, and the translation of protos."""
