"""The table of published models in docs/sizing.md: `python -m tests.support.published_table`.

Ours beside the source's, and what is refused. A test of tier engines fails when it is stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
    return "".join([*lines, _END])


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
