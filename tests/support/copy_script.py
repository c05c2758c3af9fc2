"""The script of an engine whose agent copies `note.txt` to `out.txt` and is done, any number of times."""

from __future__ import annotations

from typing import Final

COPY_SCRIPT: Final = """
strict: false
turns:
  - when: {has_tool_result: false}
    repeat: true
    reply: |-
      Let me look.
      <tool_call>
      {"name": "bash", "arguments": {"command": "cat note.txt > out.txt; cat out.txt"}}
      </tool_call>
  - when: {has_tool_result: true}
    repeat: true
    reply: Done.
"""
