"""What Penstock costs, measured: `python -m benchmarks` or `make bench`; docs/benchmarks.md says what it means."""
