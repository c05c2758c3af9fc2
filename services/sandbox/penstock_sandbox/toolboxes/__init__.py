"""Toolboxes: packages of npm and PyPI and language runtimes, mounted into sandboxes."""
