#!/bin/sh
# Starts the native build of Copilot CLI that fits this machine, as the npm package's own script does by way of Node, with the
# address of the model, which no setting of it holds.
case $(uname -m) in
x86_64) build=x64 ;;
aarch64) build=arm64 ;;
*) echo "copilot-cli has no build for $(uname -m)" >&2; exit 126 ;;
esac
if [ -e "$HOME/.copilot/gate.env" ]; then
    set -a
    . "$HOME/.copilot/gate.env"
    set +a
fi
exec "${0%/*}/../node_modules/@github/copilot-linux-$build/copilot" "$@"
