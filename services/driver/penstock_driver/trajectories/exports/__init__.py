"""Stores ended rollouts at any fsspec URL, as the tables of docs/exports.md."""
