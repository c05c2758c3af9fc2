"""The only package here, beside `service.py`, that knows protos."""
