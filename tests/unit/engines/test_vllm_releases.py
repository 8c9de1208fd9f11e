"""What only some releases of vLLM cannot do is refused, by the release that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, launcher_of
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

_CHOSEN = ("-tp", "2", "--device_ids", "0,2")


def _serve(folder: Path, release: str, *options: str) -> tuple[str, ...]:
    """Return a command of an environment in which that release is installed."""
    (folder / "bin").mkdir()
    (folder / "bin/python3").touch(mode=0o755)
    (folder / f"lib/python3.12/site-packages/vllm-{release}.dist-info").mkdir(parents=True)
    script = folder / "bin/vllm"
    script.write_text(f"#!{folder}/bin/python3\n")
    script.chmod(0o755)
    return (str(script), "serve", "m", *options)


def _count(name: str, command: tuple[str, ...]) -> int:
    integration = integration_of(name)
    launcher = launcher_of(integration)
    return launcher.requirements(EngineStart(integration, command, {"PATH": ""})).count


def test_before_0_32_chosen_gpus_would_have_ranks_share_a_place(tmp_path: Path) -> None:
    command = _serve(tmp_path, "0.31.0", *_CHOSEN)
    with pytest.raises(BadInputError, match="two may write to one place") as caught:
        _count("vllm", command)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)
    assert _count("vllm-offloading", command) == 1


@pytest.mark.parametrize("text", ["device-ids: 0,2", "device_id: [0, 2]", "'device-ids': 0,2"])
def test_a_file_may_choose_them_as_well(tmp_path: Path, text: str) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(f"port: 80\n{text}\n")
    command = _serve(tmp_path, "0.31.0", "-tp", "2", "--config", str(path))
    with pytest.raises(BadInputError, match="two may write to one place"):
        _count("vllm", command)
    assert _count("vllm-offloading", command) == 1


def test_a_file_may_say_that_there_are_several(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor_parallel_size: 2\n")
    command = _serve(tmp_path, "0.31.0", "--device-ids", "0,2", "--config", str(path))
    with pytest.raises(BadInputError, match="two may write to one place"):
        _count("vllm", command)


@pytest.mark.parametrize("word", ["--device-id", "--device_i", "--device-id=0,2"])
def test_a_shortened_word_is_to_be_written_out(tmp_path: Path, word: str) -> None:
    with pytest.raises(BadInputError, match="short for --device-ids"):
        _count("vllm", _serve(tmp_path, "0.31.0", "-tp", "2", word, "0,2"))


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0+cu130", "1.0", "unknown"])
def test_later_ones_and_unknown_ones_may(tmp_path: Path, release: str) -> None:
    assert _count("vllm", _serve(tmp_path, release, *_CHOSEN)) == 1


@pytest.mark.parametrize("options", [(), ("-tp", "2"), ("--device-ids=3",)])
def test_other_commands_are_no_matter(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert _count("vllm", _serve(tmp_path, "0.31.0", *options)) == 1
