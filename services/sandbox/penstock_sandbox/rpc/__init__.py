"""The service's gRPC side: each module turns one proto service's messages into calls on the domain, and back."""
