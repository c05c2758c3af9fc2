"""The fidelity suite: tests whether a model's own template lets conversations continue from the exact sampled tokens.

`cases.CASES` is the table, `dialects.DIALECTS` the wire formats between two calls; `report.examine` runs one over the
other for a model's files. `python -m penstock_interception.conformance` is the command.
"""
