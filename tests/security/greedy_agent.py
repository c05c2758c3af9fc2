"""An agent that says and asks more than anybody reads, run inside a sandbox with nothing but the standard library.

Arguments: its config file, `greedy` or `silent` (as busy, and says and asks nothing), bytes of plain output,
lines that are events, model calls, characters of an event's text.
"""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import sys
import urllib.parse

config = json.loads(pathlib.Path(sys.argv[1]).read_text())
plain_bytes, events, calls, length = (int(word) for word in sys.argv[3:])
is_silent = sys.argv[2] == "silent"
base = urllib.parse.urlsplit(config["base_url"])
connection = http.client.HTTPConnection(str(base.hostname), base.port or 80, timeout=300)
headers = {"authorization": f"Bearer {config['key']}", "content-type": "application/json"}
for number in range(calls):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]})
    if is_silent:
        busy = sum(range(20_000))
        continue
    connection.request("POST", f"{base.path}/chat/completions", body, headers)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
line = "y" * 1023 + "\n"
output = open(os.devnull, "w") if is_silent else sys.stdout  # noqa: PTH123, SIM115 - until the end
for _ in range(plain_bytes // len(line) // 64):
    output.write(line * 64)
event = json.dumps({"type": "say", "text": "m" * length}) + "\n"
for _ in range(events // 1000):
    output.write(event * 1000)
print('{"type":"end"}')
