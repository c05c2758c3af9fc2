#!/bin/sh
# Starts the native build of Claude Code that fits this machine. The npm package puts it in place in a postinstall
# script, which a toolbox does not run.
case $(uname -m) in
x86_64) build=linux-x64 ;;
aarch64) build=linux-arm64 ;;
*) echo "claude-code has no build for $(uname -m)" >&2; exit 126 ;;
esac
for prompt in append-system-prompt system-prompt; do
    file=$HOME/.claude/$prompt.md
    [ ! -e "$file" ] || set -- "--$prompt-file" "$file" "$@"
done
modules=${0%/*}/../node_modules/@anthropic-ai
[ -d "$modules/claude-code-$build" ] || build=$build-musl
exec "$modules/claude-code-$build/claude" "$@"
