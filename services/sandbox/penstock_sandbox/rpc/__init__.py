"""The service's gRPC side: each module converts one proto service's messages to calls on the domain, and back."""
