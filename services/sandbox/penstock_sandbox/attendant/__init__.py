"""The program that serves a sandbox from inside, or from beside it, wherever the service itself cannot reach in."""
