"""Parsing of agents' conversations, turn by turn, into tokens."""
