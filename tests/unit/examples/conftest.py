"""The demo is a script with its modules beside it, as a user's would be: they are imported by their bare names."""

from __future__ import annotations

import sys
from pathlib import Path

GRPO = Path(__file__).resolve().parents[3] / "examples" / "grpo"

if str(GRPO) not in sys.path:
    sys.path.insert(0, str(GRPO))
