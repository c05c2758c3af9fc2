#!/bin/sh
# Kimi CLI looks here for ripgrep, and would fetch it from its vendor if nothing were here: it gets the sandbox's own, if any.
rg=$(command -v rg) || { echo "ripgrep (rg) is not installed here: search with grep, by the shell" >&2; exit 127; }
exec "$rg" "$@"
