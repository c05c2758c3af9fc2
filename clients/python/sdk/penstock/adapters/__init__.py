"""Penstock behind the interfaces of other projects."""
