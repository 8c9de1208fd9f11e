"""Scenes with vLLM's own classes, run in vLLM's environment by test_vllm_simple.py.

Arguments: the root, the model's folder, the stand-in's lock and log, and the file to write a line
of JSON into for each scene: its name, and what went wrong. Then names of scenes, if not all are
meant. One region a scene, claimed as `hostprep exec` does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback

from tests.engines import (  # noqa: F401 - importing them is what registers their scenes
    simple_scenes_gate,
    simple_scenes_memory,
)
from tests.engines.simple_scene import SAID, SCENES
from tests.engines.vllm_on_cpu import have_streams


def main() -> None:
    have_streams()
    logging.getLogger("vllm.hostprep").addFilter(SAID)
    wanted = sys.argv[6:]
    for function in SCENES:
        name = function.__name__
        if wanted and name not in wanted:
            continue
        SAID.lines.clear()
        os.environ.pop("STANDIN_FAIL", None)
        try:
            function()
            trouble = ""
        except BaseException:
            trouble = traceback.format_exc()
        with open(sys.argv[5], "a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "trouble": trouble}) + "\n")
    os._exit(0)  # torch and vLLM have nothing more to do


if __name__ == "__main__":
    main()
