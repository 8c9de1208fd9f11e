"""Requests that make no sense are refused before anything is claimed."""

from __future__ import annotations

from hostprep.errors import BadInputError
from hostprep.slots.model import Request

__all__ = ["check_request"]


def check_request(request: Request, tokens_per_block: int, hash_bytes: int, *, whole: bool) -> None:
    """Raise BadInputError, naming the request and the field. `whole`: states are kept."""
    who = f"request {request.id!r}"
    for name, number in (
        ("tokens", request.tokens),
        ("computed_tokens", request.computed_tokens),
        ("first_block", request.first_block),
        ("reuse_limit_tokens", request.reuse_limit_tokens or 0),
        ("prompt_tokens", request.prompt_tokens or 0),
    ):
        if type(number) is not int or number < 0:
            raise BadInputError(f"{who}: {name} is {number!r}: a whole number, 0 or more")
    if request.computed_tokens > request.tokens:
        raise BadInputError(
            f"{who}: computed_tokens is {request.computed_tokens}, more than its "
            f"{request.tokens} tokens"
        )
    if request.first_block * tokens_per_block > request.computed_tokens:
        raise BadInputError(
            f"{who}: first_block is {request.first_block}, beyond the {request.computed_tokens} "
            "computed_tokens: nobody asks for the blocks between them"
        )
    _check_hashes(request, who, tokens_per_block, hash_bytes)
    if whole and request.prompt_tokens not in (None, request.tokens):
        raise BadInputError(
            f"{who}: a chunk of {request.tokens} of {request.prompt_tokens} tokens, and there is "
            "a recurrent group: a state is kept for the end of the prompt only",
            reason="RecurrentStateInChunks",
            remedy="claim the whole prompt at once (tokens equal to prompt_tokens)",
        )


def _check_hashes(request: Request, who: str, tokens_per_block: int, hash_bytes: int) -> None:
    wanted = request.tokens // tokens_per_block - request.first_block
    if len(request.hashes) != max(0, wanted):
        raise BadInputError(
            f"{who}: {len(request.hashes)} hashes for {max(0, wanted)} full blocks "
            f"({request.tokens} tokens, {tokens_per_block} a block, from block "
            f"{request.first_block})"
        )
    if set(map(type, request.hashes)) - {bytes}:
        raise BadInputError(f"{who}: hashes are bytes")
    lengths = set(map(len, request.hashes)) - {hash_bytes}
    if lengths:
        raise BadInputError(
            f"{who}: a hash of {min(lengths)} bytes: this pool's have {hash_bytes} (hash_bytes)"
        )
    ids = request.token_ids
    if ids is not None and len(ids) < request.tokens:
        raise BadInputError(f"{who}: token_ids has {len(ids)} of {request.tokens} tokens")
