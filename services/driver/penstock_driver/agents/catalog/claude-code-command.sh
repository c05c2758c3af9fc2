#!/bin/sh
# What Claude Code runs its commands with: they do not inherit the address of the model.
unset ANTHROPIC_BASE_URL
exec bash -c "$1"
