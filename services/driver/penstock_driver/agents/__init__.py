"""Agents: their specs, their launch, and the parsing of their output."""
