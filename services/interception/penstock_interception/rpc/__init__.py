"""The gRPC side: the servicers and the translation of their messages."""
