# What every attack starts with. It says what it found in lines that begin with REDTEAM; the runner reads those and no others.
place=$HOME/.penstock-redteam
tried() { echo "REDTEAM tried: $*"; }
broken() { echo "REDTEAM broken: $*"; }
inapplicable() { echo "REDTEAM inapplicable: $*"; exit 0; }
own_kernel() { [ "$(cat $place/kernel)" = own ]; }
need() { command -v "$1" >/dev/null 2>&1 || inapplicable "the sandbox has no $1"; }
