"""Whether an engine's blocks are kept, and whether those of an earlier process are its own.

Decided once, in the scheduler's process, as soon as everything that the blocks depend on is known:
vLLM's configuration, what each rank says of its tensors, the hash's seed, the weights. Until then
the host tier stays shut, as it does while its gate is closed; unless it is certain already that
nothing can be recovered: then it opens empty, and records once the rest is known.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from hostprep.client.kept import WarmReport, write_warm_report
from hostprep.engines.vllm.identity import (
    Identity,
    config_identity,
    seed_identity,
    weights_identity,
)
from hostprep.engines.vllm.offloading_compat import LOG
from hostprep.engines.weights import process_started_s
from hostprep.errors import HostprepError
from hostprep.slots.directory import Directory
from hostprep.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from hostprep.paths import PoolPaths
    from hostprep.slots import SlotPool

KEY_BYTES = 36
"""vLLM's keys of cryptographic hashes: a SHA-256, and the number of a group."""
REPORT_EVERY_S = 10.0
_HARMLESS: dict[str, tuple[object, ...]] = {
    "collective_rpc": ("compute_weight_checksums", "profile"),
    # Level 0 pauses scheduling; the first moves the weights away and back, as they are.
    "sleep": (0, 1),
}
"""By method of vLLM's engine: first arguments with which it changes no weights; others may."""


class Keeper:
    """One engine's kept blocks. The scheduler's thread uses it; only the digest has its own."""

    def __init__(
        self,
        name: str,
        directory: Directory,
        *,
        engine: Identity,
        paths: PoolPaths,
        region: str,
        chunk_bytes: int,
        deadline_s: float,
    ) -> None:
        """`engine`: the release and the geometry. Nothing is decided yet.

        `deadline_s`: seconds after which weights that are still not known count as unknown.
        """
        self._until_s = time.monotonic() + deadline_s
        self.name = name
        self.directory = directory
        self._paths = paths
        self._region = region
        self._chunk_bytes = chunk_bytes
        self._known = engine
        self._kept = dict(directory.identity or {})
        self._problem = directory.problem
        self._ranks: Identity | None = None
        self._weights: Identity | None = None
        self._requests: dict[str, Any] = {}
        self._recover: Callable[[], SlotPool] | None = None
        self.is_open = False
        """Whether the tier may be used: nothing will be recovered any more, or all of it was."""
        self.is_decided = False
        self._is_attached = False
        self._report = WarmReport()
        self._loaded = self._shown = 0
        self._ended = threading.Event()
        self._report_lock = threading.Lock()
        self._reporter: threading.Thread | None = None

    def attach(
        self, vllm_config: Any, kv_cache_config: Any, recover: Callable[[], SlotPool]
    ) -> None:
        """Begin to find out what blocks depend on. `recover` fills the index, and returns it."""
        self._is_attached = True
        self._recover = recover
        self._known = self._known.joined(config_identity(vllm_config, kv_cache_config))
        threading.Thread(
            target=self._find_weights, args=(vllm_config,), name="hostprep-weights", daemon=True
        ).start()
        _watch_updates(self)

    def add_ranks(self, ranks: Identity) -> None:
        """Take what all ranks said of their tensors."""
        self._ranks = ranks

    def add_request(self, request: Any) -> None:
        """Note a request, until it is `finished`."""
        self._requests[request.request_id] = request

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def may_keep(self, request_id: str) -> bool:
        """Tell whether what a request stores is named by its hashes in another process as well.

        An adapter is known by its name, media by ids that a client may choose, and a prompt of
        embeddings has no tokens: what they stand for may differ the next time.
        """
        request = self._requests.get(request_id)
        return request is not None and not (
            getattr(request, "lora_request", None)
            or getattr(request, "mm_features", None)
            or getattr(request, "prompt_embeds", None) is not None
        )

    def note_loads(self, count: int) -> None:
        """Count loads of recovered chunks."""
        self._loaded += count

    def take_loaded_bytes(self) -> int:
        """Return the bytes of the loads that were noted since the last call."""
        count, self._shown = self._loaded - self._shown, self._loaded
        return count * self._chunk_bytes

    def close(self) -> None:
        """Write the last report."""
        if self.is_decided and not self._ended.is_set():
            self._ended.set()
            self._update_report()

    def poll(self, *, is_used: bool = True) -> None:
        """Decide, if it can be decided now. Raises nothing: the scheduler would end by it.

        While the tier is not used, its gate being closed, nothing that is kept is voided: an engine
        that fails or is killed before it ever had use of it leaves it to the next one.
        """
        if self.is_decided:
            return
        weights = self._weights  # once: another thread finds them
        try:
            known = self._known_but_weights()
            if weights is not None:
                known = known.joined(weights)
            if is_used:
                self._poll(known, has_weights=weights is not None)
            elif weights is not None and self._kept and self._is_same(known):
                self._decide(known)
        except Exception as error:
            LOG.exception("whether blocks are kept could not be decided")
            self._give_up({"identity": str(error)})

    def _known_but_weights(self) -> Identity:
        # vLLM brings what its ranks say before it takes the first step.
        ranks = self._ranks or Identity({}, {"ranks": "they said nothing"})
        return self._known.joined(_seed()).joined(ranks)

    def _is_same(self, known: Identity) -> bool:
        return not known.unknown and not known.differences(self._kept)

    def _poll(self, known: Identity, *, has_weights: bool) -> None:
        if not self._is_attached:
            self._give_up({"kv_connector": "only HostprepOffloadingConnector sees what counts"})
        elif known.unknown:
            self._give_up(known.unknown)
        elif has_weights:
            self._decide(known)
        elif time.monotonic() > self._until_s:
            self._give_up({"weights": "they were not known in time"})
        else:
            self._open_if_nothing_fits(known)

    def stop(self, why: str) -> None:
        """Void what is kept, and keep nothing until a restart: the weights are about to change."""
        self._give_up({"weights": why})

    def renew(self) -> None:
        """Go on under the same identity after everything was forgotten (vLLM's reset)."""
        if not self.is_decided:  # nothing is left that could be recovered
            self._kept = {}
        elif self._kept:
            self.directory.reset(self._kept)

    def _find_weights(self, vllm_config: Any) -> None:
        try:
            self._weights = weights_identity(
                vllm_config, self._kept, hub_cache=_hub_cache(), started_s=process_started_s()
            )
        except Exception as error:  # whatever it is: weights that are not known
            LOG.exception("the weights' identity could not be found")
            self._weights = Identity({}, {"weights": str(error)})

    def _open_if_nothing_fits(self, known: Identity) -> None:
        """Open an empty tier where nothing that is found out later can make the contents ours."""
        if self.is_open:  # it is asked at each step, until the weights are known
            return
        differs = any(each.now is not None for each in known.differences(self._kept))
        if not self._kept or differs:
            self._say_why_empty(known)
            self.directory.void()
            self._open_empty()

    def _decide(self, known: Identity) -> None:
        self.is_decided = True
        differences = known.differences(self._kept) if self._kept else []
        if self._recover is not None and not self.is_open and self._kept and not differences:
            pool = self._recover()
            recovered = len(pool.recovered_hashes())
            size_bytes = recovered * self._chunk_bytes
            self._report = WarmReport(recovered_blocks=recovered, recovered_bytes=size_bytes)
            LOG.info(
                "%d chunks (%s) of %s are kept from before",
                recovered,
                format_bytes(size_bytes),
                self.name,
            )
        else:
            if not self.is_open:
                self._say_why_empty(known)
            self._kept = dict(known.fields)
            self.directory.reset(self._kept)
            self._open_empty()
        self.is_open = True
        self._write_report(self._report)

    def _open_empty(self) -> None:
        """Open the tier, but for slots to which a dead engine's copies may still be under way."""
        if not self.is_open and self._recover is not None:
            self._recover()
        self.is_open = True

    def _say_why_empty(self, known: Identity) -> None:
        if self._problem:
            LOG.warning("%s starts empty: %s", self.name, self._problem)
            self._report = WarmReport(refused={"directory": ("", self._problem)})
        differences = [each for each in known.differences(self._kept) if each.now is not None]
        for each in differences if self._kept else ():
            LOG.warning("%s starts empty: %s", self.name, each)
        if self._kept:
            refused = {each.field: (str(each.was), str(each.now)) for each in differences}
            self._report = WarmReport(refused=refused)

    def _give_up(self, unknown: Mapping[str, str]) -> None:
        self.is_decided = True
        self._kept = {}
        self.directory.void()
        self._open_empty()
        for name, why in unknown.items():
            LOG.warning("nothing of %s is kept: %s: %s", self.name, name, why)
        self._write_report(WarmReport(refused={name: ("", why) for name, why in unknown.items()}))

    def _write_report(self, report: WarmReport) -> None:
        """Report a decision, and from then on how many chunks are kept."""
        with self._report_lock:
            self._report = replace(report, at_s=time.time())
            self._write()
        if self._reporter is None:
            # A thread: an engine without requests takes no steps, in which it could report.
            self._reporter = threading.Thread(
                target=self._go_on_reporting, name="hostprep-report", daemon=True
            )
            self._reporter.start()

    def _go_on_reporting(self) -> None:
        while not self._ended.wait(REPORT_EVERY_S):
            self._update_report()

    def _update_report(self) -> None:
        with self._report_lock:
            before = (self._report.kept_blocks, self._report.loaded_blocks)
            if before != (self.directory.count(), self._loaded):
                self._write()

    def _write(self) -> None:
        self._report = replace(
            self._report, kept_blocks=self.directory.count(), loaded_blocks=self._loaded
        )
        try:
            write_warm_report(self._paths, self._region, self.name, self._report)
        except (HostprepError, OSError) as error:  # it is for people: the engine goes on
            LOG.warning("what is kept cannot be shown: %s", error)


def _seed() -> Identity:
    """Return the hash with which every chain begins, as vLLM has set it in this process."""
    module: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    return seed_identity(getattr(module, "NONE_HASH", None))


def _hub_cache() -> str:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    return str(constants.HF_HUB_CACHE)


_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()


def _watch_updates(keeper: Keeper) -> None:
    """Have calls that may change weights stop the keeper before they are made.

    They go from vLLM's front end to its engine's process, where this is, and on to the workers; a
    manager never hears of them. Where a release has no such method nothing is kept.
    """
    core: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    if "collective_rpc" not in vars(core):
        keeper.stop("this release's calls of workers cannot be seen")
        return
    _keepers.add(keeper)
    for name in ("collective_rpc", "set_weight_version", "sleep"):
        method = vars(core).get(name)
        if method is not None and not hasattr(method, "hostprep_watches"):
            setattr(core, name, _watched(name, method))


def _watched(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        what = args[0] if args else named.get("level" if name == "sleep" else "method", 1)
        if what not in _HARMLESS.get(name, ()):
            for keeper in list(_keepers):
                keeper.stop(f"{name}({str(what)[:80]!r}) may change them")
        return method(self, *args, **named)

    call.hostprep_watches = True  # type: ignore[attr-defined]
    return call
