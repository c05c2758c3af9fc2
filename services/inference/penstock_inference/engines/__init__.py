"""Engines: sample token ids from prompt token ids, behind one protocol (`base.Engine`)."""
