"""The gRPC servicer: messages to calls, results to messages."""
