#!/bin/sh
# Runs a Terminal-Bench task's run-tests.sh and makes a reward of the summary that pytest prints with -rA: binary (all
# tests passed) or fraction. Without a summary there is no reward: then the tests were never run.
set -eu
here=$(dirname "$0")
reward=$PENSTOCK_REWARD_FILE
how=$1
unset PENSTOCK_REWARD_FILE
# What the tests ran may have written there: the reward is written last, or none is.
trap 'ended=$?; [ "$ended" = 0 ] || : >"$reward"' EXIT

fresh=$(mktemp -d)
while IFS= read -r name; do
    case $name in */*) mkdir -p "$fresh/${name%/*}" ;; esac
    cp -p "/tests/$name" "$fresh/$name"
done <"$here/manifest"
rm -rf /tests
cp -Rp "$fresh" /tests
rm -rf "$fresh"

said=$(mktemp)
bash /tests/run-tests.sh >"$said" 2>&1 || true
tail -c 3000 "$said"
awk -v how="$how" '
    { gsub(/\033\[[0-9;]*m/, ""); sub(/\r$/, "") }
    /^=+ short test summary info =+$/ { inside = 1; passed = 0; failed = 0; next }
    /^=+ .* =+$/ { inside = 0 }
    inside && /^(PASSED|XFAIL|SKIPPED) / { passed++ }
    inside && /^(FAILED|ERROR|XPASS) / { failed++ }
    END {
        total = passed + failed
        if (total == 0) exit
        value = how == "fraction" ? passed / total : (failed == 0)
        printf "{\"reward\": %.6f, \"components\": {\"passed\": %d, \"failed\": %d}}", value, passed, failed
    }
' "$said" >"$reward"
rm -f "$said"

