#!/bin/sh
# Runs a Terminal-Bench task's run-tests.sh and makes a reward of what pytest prints with -rA: binary (all tests passed)
# or fraction. The counts are those of the line with which pytest ends: the summary above it folds skips, and its
# messages may quote anything that an agent's program printed. Without a summary the tests were never run: no reward.
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
    /^=+ short test summary info =+$/ { summary = 1 }
    summary && /^(=+ )?([0-9]+ [a-z ]+, )*[0-9]+ [a-z ]+ in [0-9.]+ ?s(econds)?( \([0-9:, a-z]+\))?( =+)?$/ {
        passed = failed = 0
        for (i = 2; i <= NF; i++) {
            if ($(i - 1) !~ /^[0-9]+$/) continue
            if ($i ~ /^(passed|skipped|xfailed),?$/) passed += $(i - 1)
            if ($i ~ /^(failed|errors?|xpassed),?$/) failed += $(i - 1)
        }
    }
    END {
        total = passed + failed
        if (total == 0) exit
        value = how == "fraction" ? passed / total : (failed == 0)
        printf "{\"reward\": %.6f, \"components\": {\"passed\": %d, \"failed\": %d}}", value, passed, failed
    }
' "$said" >"$reward"
rm -f "$said"

