"""The commands of `penstock`, one module each."""
