"""`hostprep size` answers, or refuses in one line with a next step, whatever its options are."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostprep.cli.main import main
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

_PATHS = sorted(str(path) for path in MODELS.glob("*.json"))
_OPTIONS = {
    "--engine": ["vllm", "sglang", "trtllm", "none"],
    "--gpu": ["h200x8", "h100", "a100", "96Gix4", "l4x99", "mi300xx16", "0", ""],
    "--tp": ["1", "2", "3", "8", "16", "0", "-1"],
    "--pp": ["1", "2", "3", "200"],
    "--max-batch-size": ["1", "7", "1024", "1048577", "0"],
    "--max-seq-len": ["1", "4096", "131072", "2147483648", "9999999999"],
    "--max-num-tokens": ["1", "16", "8192", "2147483648"],
    "--tokens-per-block": ["1", "16", "17", "256", "1048576"],
    "--beam-width": ["1", "2"],
    "--speculative-tokens": ["0", "1", "65536"],
    "--typical-seq-len": ["1", "1000"],
    "--kv-dtype": ["fp8", "nvfp4", "fp8_ds_mla", "int3"],
    "--index-dtype": ["bfloat16", "fp8"],
    "--state-dtype": ["float32", "bfloat16"],
    "--weights": ["1", "1Gi", "100Gi", "9Ei"],
    "--gpu-memory-utilization": ["0.1", "0.95", "nan", "0", "1e-300", "inf"],
    "--gpu-reserve": ["0", "1Gi", "100Gi"],
    "--gpu-memory": ["1", "40Gi", "1Ti"],
    "--host-memory": ["1", "10Gi", "4Ti", "7Ei"],
    "--host-tokens": ["1", "100000", "1000000000"],
    "--output": ["json", "yaml", "table"],
    "--regions": ["1", "PerGPU", "Single", "0", "99999"],
    "--integration": ["vllm", "lmcache", "mooncake", "sglang", "trtllm", "vllm-simple", ""],
    "--backing": ["Base", "HugeTLB1Gi", "HugeTLB2Mi,Base", "Huge"],
    "--name": ["kv", "K V"],
}
_GIVEN = st.sets(st.sampled_from(sorted(_OPTIONS)), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(_OPTIONS[name]) for name in names})
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(_PATHS), min_size=1, max_size=2), _GIVEN)
def test_there_is_an_answer_or_a_next_step(paths: list[str], given_options: dict[str, str]) -> None:
    arguments = [word for option in given_options.items() for word in option]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["size", *paths, *arguments])
    assert code in (0, 2)
    if given_options.get("--output") == "json":
        json.loads(out.getvalue())
    elif code == 2:
        for line in err.getvalue().splitlines():
            assert line.startswith("hostprep: ")
            assert "; " in line
