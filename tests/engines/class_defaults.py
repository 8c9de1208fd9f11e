"""Run by an engine's interpreter: what transformers' classes fill in where a field is left out.

Reads {model: fields of its text config} from standard input. Prints for each model whose class
transformers has: `known`, the fields that the class has, and `filled_in`, {field of the file: value
that the class gives it when the file does not}.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def main() -> None:
    """Answer for all models at once: the import takes seconds."""
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
    )

    warnings.simplefilter("ignore")
    answer = {}
    for name, fields in json.load(sys.stdin).items():
        if fields.get("model_type") in CONFIG_MAPPING:
            kind = CONFIG_MAPPING[fields["model_type"]]
            known = kind().to_dict()
            answer[name] = {"known": sorted(known), "filled_in": _filled_in(kind, known, fields)}
    json.dump(answer, sys.stdout, default=str, indent=1, sort_keys=True)


def _filled_in(kind: Any, known: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in fields:
        if name not in known or name == "model_type":
            continue
        rest = {key: value for key, value in fields.items() if key not in (name, "model_type")}
        try:
            found[name] = kind(**rest).to_dict().get(name)
        except Exception:  # whatever the class checks: then there is no default for this one
            continue
    return found


if __name__ == "__main__":
    main()
