"""The gate's program: what it decides before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_codec import tiny_tokenizer

_ENCODES = """
import os
import sys
from penstock_chassis import server
from penstock_interception import __main__ as program
from tokenizers import Tokenizer

server.run = lambda *_: None
program.main()
tokenizer = Tokenizer.from_file(sys.argv[1])
before = set(os.listdir("/proc/self/task"))
tokenizer.encode_batch_fast(["these", "were", "never", "seen"], add_special_tokens=False)
print(len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.parametrize(("asked", "starts"), [(None, False), ("true", True)])
def test_tokenizer_starts_no_threads_unless_configured(asked: str | None, starts: bool, tmp_path: Path) -> None:
    """For a few new words they cost a multiple of the encoding itself."""
    tiny_tokenizer.build(["some words to learn"], 300).write(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    if asked is not None:
        environment["TOKENIZERS_PARALLELISM"] = asked
    command = [sys.executable, "-c", _ENCODES, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (int(done.stdout) > 0) is starts
