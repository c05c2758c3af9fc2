"""What tells one model from another where names do not: the files of a directory, a task's own models."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.client.tasks.spec import Inference, RolloutModel, Upstream
from penstock.evaluation import identity
from penstock.evaluation.identity import files_digest, models_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory."""
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def touch(file: Path, nanoseconds: int) -> None:
    """Sets the time of the last change."""
    os.utime(file, ns=(nanoseconds, nanoseconds))


@pytest.mark.requirement("R63")
def test_other_weights_and_other_files_are_another_model(model: Path) -> None:
    """Of the same size, in the same directory, at the same time."""
    weights = model / "model.safetensors"
    touch(weights, 1)
    found = [files_digest(model)]
    weights.write_bytes(b"WEIGHTS")
    touch(weights, 1)
    found.append(files_digest(model))
    (model / "chat_template.jinja").write_bytes(b"")
    found.append(files_digest(model))
    assert len(set(found)) == 3


@pytest.mark.requirement("R63")
def test_small_files_are_known_by_their_content(model: Path) -> None:
    """A copy of a model is that model; what tools and trainers leave beside it is not of it."""
    before = files_digest(model)
    touch(model / "model.safetensors", 1)
    (model / ".cache").write_bytes(b"x")
    (model / "checkpoint-1").mkdir()
    (model / "checkpoint-1" / "model.safetensors").write_bytes(b"x")
    assert files_digest(model) == before


@pytest.mark.requirement("R63")
def test_large_files_are_known_without_reading_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size and time: weights have gigabytes."""
    monkeypatch.setattr(identity, "_READ_BYTES", 4)
    weights = model / "model.safetensors"
    touch(weights, 1)
    before = files_digest(model)
    assert files_digest(model) == before
    touch(weights, 2)
    assert files_digest(model) != before
    weights.write_bytes(b"further")
    touch(weights, 1)
    assert files_digest(model) == before, "it was not read"


@pytest.mark.requirement("R63")
def test_models_of_a_task_are_told_apart_but_for_keys() -> None:
    """A key that was replaced is the same model."""
    teacher = RolloutModel(policy_id="teacher", source=Upstream(base_url="http://a/v1", api_key="one", model="m"))
    renewed = replace(teacher, source=Upstream(base_url="http://a/v1", api_key="two", model="m"))
    other = replace(teacher, source=Upstream(base_url="http://a/v1", api_key="one", model="n"))
    student = RolloutModel(policy_id="student", source=Inference())
    assert models_digest([teacher, student]) == models_digest([renewed, student])
    different = [[], [teacher], [other], [student], [teacher, student], [student, teacher]]
    assert len({models_digest(models) for models in different}) == len(different)
    assert models_digest([]) == ""
