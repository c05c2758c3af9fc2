"""Smoke tests of agents."""
