"""Trainers' own packages on our plug-ins: `python -m tests.trainers NAME`."""
