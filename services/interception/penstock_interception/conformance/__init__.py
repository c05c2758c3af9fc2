"""The fidelity suite: does a model's own template let conversations go on from exactly the tokens that were sampled?

`cases.CASES` is the table, `dialects.DIALECTS` what a conversation goes over between two calls, `report.examine` runs
one on the other for a model's files. `python -m penstock_interception.conformance` is the command.
"""
