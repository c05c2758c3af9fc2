"""Several connections between two processes: a port of several gRPC servers, and a channel of several connections."""
