"""What an engine is told to serve: the limits that decide how much cache is needed at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostprep.errors import BadInputError

__all__ = ["LONGEST_TOKENS", "MOST_TOKENS_PER_BLOCK", "TOKENS_PER_BLOCK", "Limits"]

LONGEST_TOKENS = 1 << 31
MOST_TOKENS_PER_BLOCK = 1 << 20
TOKENS_PER_BLOCK = 32
"""Of a block, where nobody says otherwise."""
_MOST = {
    "max_batch_size": 1 << 20,
    "max_seq_len": LONGEST_TOKENS,
    "max_num_tokens": LONGEST_TOKENS,
    "tokens_per_block": MOST_TOKENS_PER_BLOCK,
    "beam_width": 1 << 10,
    "tensor_parallel": 1 << 14,
    "pipeline_parallel": 1 << 14,
    "typical_seq_len": LONGEST_TOKENS,
}
_OPTIONS = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Serving limits, in the words of TensorRT-LLM.

    vLLM's are max_num_seqs, max_model_len, max_num_batched_tokens and block_size.
    Raises BadInputError, naming the command line's option, for a number that makes no sense.
    """

    max_batch_size: int
    """Requests that are served at once."""
    max_seq_len: int
    """Tokens of the longest request, its answer included."""
    max_num_tokens: int = 8192
    """Tokens of one step, over all requests: how long a chunk of a prompt can be."""
    tokens_per_block: int = TOKENS_PER_BLOCK
    beam_width: int = 1
    speculative_tokens: int = 0
    """Tokens that are drafted beyond each step's own."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    typical_seq_len: int | None = None
    """Tokens of a usual request: what leftover memory is divided by. None: `max_seq_len`."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            _check(name, getattr(self, name), 1, most)
        _check("speculative_tokens", self.speculative_tokens, 0, 1 << 16)
        if self.typical > self.max_seq_len:
            raise BadInputError(
                f"--typical-seq-len: is {self.typical}, more than --max-seq-len, "
                f"{self.max_seq_len}",
                remedy="give at most that",
            )

    @property
    def typical(self) -> int:
        """Tokens of a usual request."""
        return self.max_seq_len if self.typical_seq_len is None else self.typical_seq_len

    @property
    def sequences(self) -> int:
        """Sequences at once: every beam of every request."""
        return self.max_batch_size * self.beam_width

    def for_batch(self, max_batch_size: int) -> Limits:
        """Return them for another number of requests at once."""
        return replace(self, max_batch_size=max_batch_size)

    def for_length(self, max_seq_len: int) -> Limits:
        """Return them for another longest request."""
        typical = self.typical_seq_len and min(self.typical_seq_len, max_seq_len)
        return replace(self, max_seq_len=max_seq_len, typical_seq_len=typical)


def _check(name: str, value: int | None, least: int, most: int) -> None:
    if value is None and name == "typical_seq_len":
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise BadInputError(f"--{option}: is {value}", remedy=f"give {least} to {most}")
