"""Which model `penstock up` serves where none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.connections import model_sources


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's package, with the model that its wheel brings."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}", encoding="utf-8")
    monkeypatch.setattr(model_sources, "demo_package", lambda: tmp_path)
    return tmp_path / "model"


@pytest.mark.requirement("R20")
@pytest.mark.parametrize(
    ("engine", "scripted", "upstreams", "found"),
    [
        ("numpy", False, False, True),
        ("none", False, False, True),
        ("none", False, True, True),
        ("numpy", False, True, False),
        ("numpy", True, False, False),
        ("vllm", False, False, False),
        ("openai", False, False, False),
    ],
)
def test_the_small_model_stands_in_only_where_it_or_its_tokenizer_can_be_used(
    installed: Path, engine: str, scripted: bool, upstreams: bool, found: bool
) -> None:
    """A trainer with an engine of its own needs no directory to try the services."""
    chosen = model_sources.unnamed_model(engine, scripted=scripted, upstreams=upstreams)
    assert chosen == (installed if found else None)
    if engine == "none":
        assert model_sources.model_choice(chosen, engine, None).model_dir == installed


@pytest.mark.requirement("R20")
def test_without_the_small_model_an_engine_of_ones_own_needs_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a clone, or with the services alone."""
    monkeypatch.setattr(model_sources, "demo_package", lambda: None)
    assert model_sources.unnamed_model("none", scripted=False, upstreams=False) is None
    with pytest.raises(SystemExit):
        model_sources.model_choice(None, "none", None)
    assert "--engine none needs --model-dir DIR" in capsys.readouterr().err
