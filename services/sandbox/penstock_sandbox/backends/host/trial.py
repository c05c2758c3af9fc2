"""What a trial sandbox's shell says about its rights: the part of the checks that every backend on this host shares.

Invariants: a line that cannot be read is a failed check; the image needs nothing but a shell's builtins.
"""

from __future__ import annotations

from typing import Final

RIGHTS: Final = r"""
# bash seeks back to the end of each line that it reads, and the kernel writes the file anew for it: where a number
# before has other digits by then (SigQ counts over all processes of a user), the next line begins elsewhere. So it
# reads again.
status() {
  for try in 1 2 3 4 5 6 7 8 9 10; do
    while read -r key value; do [ "$key" != "$1:" ] || { echo "$value"; return; }; done < /proc/self/status
  done
  echo unknown
}
# Ambient capabilities are permitted ones.
for set in CapInh CapPrm CapEff CapBnd; do
  case "$(status $set)" in *[!0]*) echo "capabilities remain: $set";; esac
done
[ -n "$OWN_KERNEL" ] || [ "$(status NoNewPrivs)" = 1 ] || echo "privileges can be gained"
"""
"""Prints a line for each right that a closed sandbox has not. ``OWN_KERNEL`` is set where a kernel of its own shows no
``NoNewPrivs``. Defines ``status NAME``, which prints a value of the process's, or ``unknown``."""
