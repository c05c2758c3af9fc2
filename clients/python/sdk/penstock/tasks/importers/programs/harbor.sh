#!/bin/sh
# Runs a Harbor task's tests/test.sh as Harbor does, and passes its reward on. What is in /tests and /logs/verifier goes
# first; only the files of the manifest come back. Without a manifest the tests are those of the verifier's own image.
set -eu
here=$(dirname "$0")
reward=$PENSTOCK_REWARD_FILE
# The tests may run what the agent wrote. It is not told where the reward goes; and what it writes there all the same
# does not count: the reward is written last, or none is.
unset PENSTOCK_REWARD_FILE
trap 'ended=$?; [ "$ended" = 0 ] || : >"$reward"' EXIT

if [ -f "$here/manifest" ]; then
    fresh=$(mktemp -d)
    while IFS= read -r name; do
        case $name in */*) mkdir -p "$fresh/${name%/*}" ;; esac
        cp -p "/tests/$name" "$fresh/$name"
    done <"$here/manifest"
    rm -rf /tests
    cp -Rp "$fresh" /tests
    rm -rf "$fresh"
fi
rm -rf /logs/verifier
mkdir -p /logs/verifier /logs/agent /logs/artifacts
chmod +x /tests/test.sh

status=0
/tests/test.sh || status=$?
echo "test.sh ended with $status"

text=/logs/verifier/reward.txt
json=/logs/verifier/reward.json
for file in "$text" "$json"; do
    if [ -h "$file" ]; then
        echo "$file is a link" >&2
        exit 1
    fi
done
value=
if [ -s "$json" ]; then
    flat=$(tr -d '\r\n' <"$json")
    value=$(printf '%s' "$flat" | sed -n 's/.*"reward"[[:space:]]*:[[:space:]]*\([-+0-9.eE]*\).*/\1/p')
    if [ -z "$value" ]; then
        # Without that name a single number is the reward.
        value=$(printf '%s' "$flat" | sed -n 's/^[[:space:]]*{[^:,]*:[[:space:]]*\([-+0-9.eE]*\)[[:space:]]*}[[:space:]]*$/\1/p')
    fi
fi
# reward.json comes first, as in Harbor.
if [ -n "$value" ]; then
    printf '{"reward": %s, "components": %s}' "$value" "$flat" >"$reward"
elif [ -s "$text" ]; then
    cat "$text" >"$reward"
elif [ -s "$json" ]; then
    echo "reward.json has several numbers and none that is called reward" >&2
    exit 1
else
    echo "test.sh wrote no reward" >&2
    exit 1
fi
