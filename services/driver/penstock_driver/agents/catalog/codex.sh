#!/bin/sh
# Starts the native build of Codex that fits this machine, with the ripgrep that comes with it. The npm package does the
# same in a program for Node, which a toolbox does not need then.
case $(uname -m) in
x86_64) build=x64 target=x86_64-unknown-linux-musl ;;
aarch64) build=arm64 target=aarch64-unknown-linux-musl ;;
*) echo "codex has no build for $(uname -m)" >&2; exit 126 ;;
esac
here="${0%/*}/../node_modules/@openai/codex-linux-$build/vendor/$target"
PATH="$PATH:$here/codex-path"
export PATH
exec "$here/bin/codex" "$@"
