"""The interception service: holds agents' model calls until a trainer or an engine answers them."""
