"""Engines: what turns prompt token ids into sampled token ids, behind one protocol (`base.Engine`)."""
