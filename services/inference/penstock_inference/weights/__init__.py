"""Weights and adapters: uploads, transfers, updates."""
