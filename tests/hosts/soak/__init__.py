"""`python -m tests.hosts soak`: many rollouts, in groups, with retries and replay, while processes and hosts are lost.

`run` drives them, `storm` loses things and asks `penstock doctor --live` about them, `trainer` is the program that
answers a third of the groups, `memory` reads the services, `account` says what is not as it must be.
"""
