#!/bin/sh
# Starts the native build of Kilo that fits this machine. The npm package does the same in a postinstall script,
# which a toolbox does not run.
case $(uname -m) in
x86_64) build=x64; grep -qw avx2 /proc/cpuinfo || build=x64-baseline ;;
aarch64) build=arm64 ;;
*) echo "kilo has no build for $(uname -m)" >&2; exit 126 ;;
esac
exec "${0%/*}/../node_modules/@kilocode/cli-linux-$build/bin/kilo" "$@"
