"""The Docker backend: one hardened container for each sandbox, served by an attendant."""
