"""Exported tables, as services and clients write and read them. docs/exports.md is the specification.

Needs orjson, and pyarrow for Parquet: `pip install 'penstock-protos[tables]'`.
"""
