#!/bin/sh
# Starts the native build of Cline that fits this machine, as the npm package's own script does by way of Node.
case $(uname -m) in
x86_64) build=x64 ;;
aarch64) build=arm64 ;;
*) echo "cline has no build for $(uname -m)" >&2; exit 126 ;;
esac
prompt=$HOME/.cline/system-prompt.md
if [ -e "$prompt" ]; then
    # The dot keeps the newlines at its end.
    text=$(cat "$prompt"; echo .)
    set -- --system "${text%.}" "$@"
fi
exec "${0%/*}/../node_modules/@cline/cli-linux-$build/bin/cline" "$@"
