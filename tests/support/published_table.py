"""The table of published models in docs/sizing.md: `python -m tests.support.published_table`.

Ours beside the source's, what is refused, and the line that vLLM logs beside vLLM's own. A test of
tier engines fails when it is stale.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hostprep.cli.size import size
from hostprep.errors import BadInputError
from testbed import model_configs
from tests.support.config_changes import Kept, kept_by
from tests.support.published_models import FACTS, REFUSED, Facts

DOCS = Path(__file__).parents[2] / "docs" / "sizing.md"
_BEGIN = "<!-- published models: python -m tests.support.published_table -->\n"
_END = "<!-- end of published models -->\n"


def published_section(models: Mapping[str, model_configs.PublishedModel]) -> str:
    """Both tables, between their marks."""
    lines = [_BEGIN, "| model | ranks | ours | the source's | where |\n", "|---|---|---|---|---|\n"]
    for facts in FACTS:
        lines += [_row(facts, ranks, models) for ranks in (1, facts.ranks[-1])]
    lines += ["\n| refused | what it says |\n", "|---|---|\n"]
    lines += [f"| {name} | {_refusal(models[name])} |\n" for name in REFUSED]
    return "".join([*lines, *_vllm_lines(models), _END])


def in_documentation(text: str) -> str:
    """The tables as they stand in the text of docs/sizing.md."""
    return text[text.index(_BEGIN) : text.index(_END) + len(_END)]


def _row(facts: Facts, ranks: int, models: Mapping[str, model_configs.PublishedModel]) -> str:
    found = {_shown(kept_by_file(models[name], ranks, facts.kv_dtype)) for name in facts.names}
    names = ", ".join(facts.names) + ("" if facts.kv_dtype == "auto" else f" ({facts.kv_dtype})")
    where = ", ".join(f"[{source.text}]({source.address})" for source in facts.seen_in)
    cells = (names, f"TP {ranks}", " or ".join(sorted(found)), _shown(facts.on_rank(ranks)), where)
    return f"| {' | '.join(cells)} |\n"


def kept_by_file(
    model: model_configs.PublishedModel, ranks: int, kv_dtype: str, drafts: int = 0
) -> Kept:
    """What hostprep.sizing says of a model's files, on one rank. Raises BadInputError."""
    quantization = model.quantization.read_bytes() if model.quantization else None
    return kept_by(
        model.config.read_bytes(),
        quantization=quantization,
        ranks=ranks,
        kv_dtype=kv_dtype,
        drafts=drafts,
    )


def _shown(kept: Kept) -> str:
    """`131,072`, `18,432 + 18,432 of 128 tokens`, `6,144; state 49,082,368`."""
    tokens, states = [], []
    for (window, ratio, is_state), size_bytes in sorted(
        kept.items(), key=lambda item: (item[0][2], item[0][0] or 0, item[0][1])
    ):
        shown = f"{size_bytes:,.0f}"
        if is_state:
            states.append(f"state {shown}")
        elif window is not None:
            tokens.append(f"{shown} (of the last {window:,})")
        else:
            tokens.append(shown + (f" (once in {ratio})" if ratio > 1 else ""))
    return "; ".join([" + ".join(tokens), *states]).removeprefix("; ")


_ANSWERS = Path(__file__).parents[1] / "engines" / "vllm_answers.json"
"""vLLM's own, asked by tests/engines/vllm_answers.py."""


def _vllm_lines(models: Mapping[str, model_configs.PublishedModel]) -> list[str]:
    """The rows of what vLLM logs: ours from the command, and its own where it builds the model."""
    answers = [
        answer
        for answer in json.loads(_ANSWERS.read_text("utf-8"))["answers"]
        if answer["case"]["tp"] == _RANKS and not answer["case"]["is_plain"]
    ]
    by_length = defaultdict(list)
    for answer in answers:
        by_length[answer["case"]["max_len"], answer["case"]["gpu_gib"]].append(answer)
    rows = []
    for (max_len, gpu_gib), same in by_length.items():
        ours = _sized_for_vllm([models[one["case"]["name"]] for one in same], max_len, gpu_gib)
        rows += [(one["case"]["name"], ours[one["case"]["name"]], _own_line(one)) for one in same]
    head = "| model | ours: tokens, requests | vLLM's own |\n"
    return ["\n", head, "|---|---|---|\n", *(f"| {' | '.join(row)} |\n" for row in sorted(rows))]


_RANKS = 8


def _own_line(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return "does not build"
    return f"{answer['tokens']:,}, {answer['concurrency']:.2f}"


def _sized_for_vllm(
    models: list[model_configs.PublishedModel], max_len: int, gpu_gib: int
) -> dict[str, str]:
    """By name what `hostprep size` says for vLLM: as a user calls it, on folders of models."""
    options = f"--engine vllm --tp {_RANKS} --gpu h200x{_RANKS} --gpu-memory {gpu_gib}Gi".split()
    options += f"--max-seq-len {max_len} --max-num-tokens 8192 -o json".split()
    names = {model.name.replace("/", "--"): model.name for model in models}
    with tempfile.TemporaryDirectory() as temporary:
        for model in models:
            folder = Path(temporary) / model.name.replace("/", "--")
            folder.mkdir()
            (folder / "config.json").symlink_to(model.config)
            if model.quantization is not None:
                (folder / "hf_quant_config.json").symlink_to(model.quantization)
        done = CliRunner().invoke(size, [*(f"{temporary}/{name}" for name in names), *options])
        document = json.loads(done.stdout)
    found = {}
    for refused in document["refused"]:
        name = next(n for n in names if f"{n}/" in refused["error"] or f"{n}:" in refused["error"])
        why = refused["error"].partition(": ")[2].removeprefix(f"{name}: ").replace("|", "\\|")
        found[names[name]] = f"refused: {why}"
    for sized in document["models"]:
        tier = sized["engine"]["gpu"]
        found[names[sized["model"]]] = f"{tier['tokens']:,}, {tier['concurrency']:.2f}"
    return found


def _refusal(model: model_configs.PublishedModel) -> str:
    try:
        kept_by_file(model, 1, "auto")
    except BadInputError as error:
        return error.message.replace("config.json: ", "", 1).replace("|", "\\|")
    raise AssertionError(f"{model.name} is sized, and was to be refused")


def main() -> None:
    """Write the tables into docs/sizing.md."""
    models = model_configs.published_models(model_configs.build(print))
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(text.replace(in_documentation(text), published_section(models)), "utf-8")


if __name__ == "__main__":
    main()
