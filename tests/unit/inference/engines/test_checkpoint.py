"""Which pushed files may replace which weights; all of it before a running vLLM hears anything."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from penstock_chassis.errors import PenstockError
from penstock_inference.engines.base import UpdateFormat
from penstock_inference.engines.checkpoint import Checkpoint, Spool, files_of
from penstock_inference.testing import random_config, random_tensors, write_model

CONFIG = random_config("llama")
TENSORS = random_tensors(CONFIG)


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    """A model's weights, in two files."""
    directory = write_model(tmp_path / "model", CONFIG, {})
    (directory / "model.safetensors").unlink()
    names = sorted(TENSORS)
    save_file({name: TENSORS[name] for name in names[::2]}, directory / "a.safetensors")
    save_file({name: TENSORS[name] for name in names[1::2]}, directory / "b.safetensors")
    return Checkpoint.read(directory)


def loaded(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """What workers would load by its plan."""
    return {name: load_file(path)[name] for path, names in checkpoint.plan() for name in names}


@pytest.mark.requirement("R63")
def test_a_plan_has_each_tensor_once_from_its_newest_file(model: Checkpoint, tmp_path: Path) -> None:
    """A partial push replaces what it names, and everything is loaded."""
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({name: TENSORS[name] + 1}, tmp_path / "part.safetensors")
    after = model.updated([tmp_path / "part.safetensors"], UpdateFormat.DELTA)
    assert model.parameter_count == after.parameter_count == sum(tensor.size for tensor in TENSORS.values())
    found = loaded(after)
    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (found[key] == (tensor + 1 if key == name else tensor)).all()


@pytest.mark.requirement("R63")
def test_a_full_push_leaves_nothing_of_the_old_files(model: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "full.safetensors"
    save_file(TENSORS, path)
    assert {Path(file) for file, _ in model.updated([path], UpdateFormat.FULL).plan()} == {path}


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("TENSOR_MISSING", {"model.norm.weight": None}),
        ("TENSOR_UNKNOWN", {"model.layers.7.mlp.up_proj.weight": np.zeros(3, np.float32)}),
        ("TENSOR_SHAPE", {"model.norm.weight": np.zeros(3, np.float32)}),
        ("TENSOR_NOT_FINITE", {"model.norm.weight": np.full(48, np.inf, np.float32)}),
        ("TENSOR_NOT_FINITE", {"model.norm.weight": np.full(48, np.nan, np.float16)}),
    ],
)
def test_unfitting_tensors_are_refused_by_name(
    model: Checkpoint, tmp_path: Path, reason: str, change: dict[str, np.ndarray | None]
) -> None:
    """Each tensor at fault is named."""
    tensors = {name: tensor for name, tensor in {**TENSORS, **change}.items() if tensor is not None}
    save_file(tensors, tmp_path / "push.safetensors")
    with pytest.raises(PenstockError) as caught:
        model.updated([tmp_path / "push.safetensors"], UpdateFormat.FULL)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == list(change)


@pytest.mark.requirement("R63")
def test_a_head_that_is_the_embedding_again_may_be_pushed(tmp_path: Path) -> None:
    """With tied embeddings trainers send both names, and one is the model's."""
    config = random_config("qwen3")
    tensors = random_tensors(config)
    model = Checkpoint.read(write_model(tmp_path / "tied", config, tensors))
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, tmp_path / "push.safetensors")
    assert model.updated([tmp_path / "push.safetensors"], UpdateFormat.FULL).sources.keys() == tensors.keys()


@pytest.mark.requirement("R83")
@given(st.integers(0, 2**16 - 1))
def test_every_bfloat16_is_judged_as_the_float_that_it_is(tmp_path_factory: pytest.TempPathFactory, bits: int) -> None:
    """All 65,536 patterns of a format that numpy does not know."""
    directory = tmp_path_factory.mktemp("bf16")
    header = b'{"w":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<H", bits))
    (directory / "config.json").write_text("{}")
    value = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    try:
        Checkpoint.read(directory).updated([path], UpdateFormat.FULL)
        judged = True
    except PenstockError as error:
        assert error.reason == "TENSOR_NOT_FINITE"
        judged = False
    assert judged == bool(np.isfinite(value))


@pytest.mark.requirement("R80")
@given(st.binary(max_size=200))
def test_no_bytes_at_all_are_more_than_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whoever sent it."""
    directory = tmp_path_factory.mktemp("bytes")
    (directory / "config.json").write_text("{}")
    model = Checkpoint.read(directory)
    (directory / "push").write_bytes(data)
    try:
        assert model.updated([directory / "push"], UpdateFormat.FULL).plan() == []
    except PenstockError as error:
        assert error.reason in ("WEIGHTS_INVALID", "TENSOR_UNKNOWN")


@pytest.mark.requirement("R23")
def test_the_spool_keeps_what_is_in_force(tmp_path: Path) -> None:
    """Pushed files do not pile up."""
    spool_dir = tmp_path / "spool"
    spool_dir.mkdir()
    spool = Spool(spool_dir)
    kept = []
    for n in range(3):
        (tmp_path / "incoming").write_bytes(bytes([n]))
        kept.append(spool.take(tmp_path / "incoming"))
    spool.keep_only(kept[1:2])
    assert [*spool_dir.iterdir()] == [kept[1]] and kept[1].read_bytes() == b"\1"


@pytest.mark.requirement("R33")
def test_a_path_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.safetensors").write_bytes(b"")
    assert files_of(tmp_path) == files_of(tmp_path / "file.safetensors") == [tmp_path / "file.safetensors"]
    with pytest.raises(PenstockError) as caught:
        files_of(tmp_path / "other")
    assert caught.value.reason == "WEIGHTS_INVALID"
