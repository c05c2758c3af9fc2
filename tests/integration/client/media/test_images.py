"""An agent that sends images, through all four services, to a trainer, its samples and an export."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.vision import PLACEHOLDER_ID, data_url, png

from penstock.analysis import export
from penstock.analysis.export_files import with_images
from penstock.analysis.verify_chain import verify
from penstock.client import Command, InvalidArgument, NotFound, Penstock, Task, Verifier
from penstock.client.intercept.calls import ModelCall

pytestmark = pytest.mark.asyncio(loop_scope="session")

IMAGES = png(3, 2, 40), png(2, 2, 80)
PROGRAM = """
import json, sys, urllib.request
config, *images = sys.argv[1:]
given = json.load(open(config))
base, key, model = given["base"], given["key"], given["model"]
messages = []
for image in images:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": image}}]
    messages.append({"role": "user", "content": parts})
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": message.get("tool_calls")})
    messages += [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message.get("tool_calls") or []]
"""
_SHOWN = ", ".join(f'"{data_url(data)}"' for data in IMAGES)
AGENT = f"""
name: looker
description: Shows its images to the model.
version: 1.0.0
toolbox:
  runtimes:
    - {{kind: python, min_version: "3.10"}}
argv: [python3, -I, -S, "{{{{home}}}}/look.py", "{{{{home}}}}/look.json", {_SHOWN}]
instruction: {{method: file, path: instruction.md}}
files:
  - path: look.json
    json: {{base: "{{{{base_url}}}}", key: "{{{{api_key}}}}", model: "{{{{model}}}}"}}
  - path: look.py
    text: |
{"".join(f"      {line}" for line in PROGRAM.splitlines(keepends=True))}
dialects: [chat_completions]
default_timeout_s: 300
"""


@pytest.mark.requirement("R85", "R137")
async def test_a_trainer_gets_images_with_calls_samples_and_exports(ps: Penstock, tmp_path: Path) -> None:
    """By digest, and as bytes where it asks; verify finds another digest, and the tokens of images are not trained."""
    file = tmp_path / "looker.yaml"
    file.write_text(AGENT)
    await ps.agents.register(file)
    info = await ps.inference.info()
    assert info.modalities == {"image"} and info.processor_sha256
    task = Task(task_id="look", instruction="Look.", verifier=Verifier(commands=[Command(["true"])]))
    handle = await ps.rollouts.create(task, "looker", run_id="images")
    calls: list[ModelCall] = []
    async for call in handle.calls(policy_version=0, images=True):
        calls.append(call)
        await call.deliver(await ps.inference.generate(call.prompt_token_ids, call.sampling, images=call.images))
    result = await handle.result()
    assert result.failure is None, [event async for event in handle.events()]
    assert [tuple(one.data for one in call.images) for call in calls] == [IMAGES[:1], IMAGES]
    wrong = [replace(one, data=IMAGES[1 - n]) for n, one in enumerate(calls[1].images)]
    with pytest.raises(InvalidArgument, match="is not the SHA-256"):
        await ps.inference.generate(calls[1].prompt_token_ids, calls[1].sampling, images=wrong)
    whole, bare = await handle.trajectory(images=True), await handle.trajectory()
    (sample,) = whole.samples
    assert tuple(one.data for one in sample.images) == IMAGES
    assert [one.sha256 for one in bare.samples[0].images] == [hashlib.sha256(data).digest() for data in IMAGES]
    assert not any(one.data for one in bare.samples[0].images)
    assert [len(one.images) for one in whole.calls] == [1, 1]
    is_image = sample.input_ids == PLACEHOLDER_ID
    assert is_image.sum() == sum(one.token_count for one in sample.images) == 10
    assert not np.any(sample.loss_mask & is_image) and sample.loss_mask.any()
    assert await handle.image(sample.images[1].sha256) == IMAGES[1]
    with pytest.raises(NotFound) as unknown:
        await handle.image(bytes(32))
    assert unknown.value.reason == "MEDIA_UNKNOWN"

    turns, sequences = list(export.turns(whole)), list(export.sequences(whole))
    assert [len(row["prompt_images"]) for row in turns] == [1, 1]
    proof = verify(turns, sequences)
    assert proof.calls == 2 and not proof.problems
    turns[0]["prompt_images"][0]["sha256"] = sequences[0]["images"][1]["sha256"]
    problems = {problem.message for problem in verify(turns, list(export.sequences(whole))).problems}
    assert any("differ from the record" in message for message in problems)
    assert any("images does not match its calls" in message for message in problems)
    read = [one async for one in with_images(ps.rollouts.export(run_id="images", images=True), tmp_path / "files")]
    assert len(read) == 1
    names = {f"{hashlib.sha256(data).hexdigest()}.png": data for data in IMAGES}
    assert {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()} == names
