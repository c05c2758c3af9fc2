"""Verification of an agent's work, in a fork of its sandbox or in place."""
