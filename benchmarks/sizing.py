"""Random models, limits and requests with the fewest slots: nothing may ever stand still.

Run by `python -m benchmarks.sizing [CONFIGURATIONS]`; 10,000 if not given. Prints the seed's case
with each sizing, then what the floor costs in throughput against memory without end. Exit code 1
if a scheduler came to a standstill with our sizing, or did not with the old one.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence

from hypothesis import HealthCheck, Phase, given, settings

from hostprep.console import print_table
from hostprep.sizing.groups import CacheGroup, Limits, min_slots
from testbed.scheduler_model import Configuration, Job, Outcome, Policy, configurations, simulate

_PLENTY = 1 << 40
_SEED = (
    CacheGroup(name="window-128", slot_bytes=1, window=128),
    CacheGroup(name="full", slot_bytes=1),
    CacheGroup(name="window-8", slot_bytes=1, window=8),
)
_LIMITS = Limits(max_batch_size=64, max_seq_len=137_984, tokens_per_block=256)
_CHANCE = random.Random(15401)
_JOBS = {
    "answers only": [Job(1, _CHANCE.randint(300, 1500)) for _ in range(256)],
    "prompts too": [Job(_CHANCE.randint(256, 1536), _CHANCE.randint(64, 512)) for _ in range(256)],
}


def main() -> int:
    """Run both parts and print them. Returns the exit code."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    went_wrong = _seeds_case()
    begin_s = time.monotonic()
    stuck, kept = _random_configurations(count)
    tried = len(kept[Policy.RESERVE])
    print(
        f"\n{tried} random configurations with the floor, both policies: {stuck} standstills "
        f"({time.monotonic() - begin_s:.0f} s)"
    )
    rows = [(policy.value, *_spread(kept[policy])) for policy in Policy]
    columns = ("THROUGHPUT AT THE FLOOR", "WORST", "LOWER QUARTILE", "MEDIAN", "ALL OF IT IN")
    print_table("", columns, rows)
    return 1 if stuck or went_wrong else 0


def _seeds_case() -> bool:
    """Print the seed's case. Returns whether anything is not as it must be."""
    ours = tuple(min_slots(group, _LIMITS) for group in _SEED)
    sizings = {
        "before": (1, 539, 1),
        "merged (PR 15588)": (2, 539, 2),
        "the seed's proposal": (64, 539, 64),
        "ours": ours,
    }
    rows = []
    wrong = False
    for work, jobs in _JOBS.items():
        for policy in Policy:
            plenty = simulate(_SEED, (_PLENTY,) * 3, _LIMITS, jobs, policy)
            for name, slots in sizings.items():
                outcome = simulate(_SEED, slots, _LIMITS, jobs, policy)
                rows.append((work, policy.value, f"{name} {slots}", *_told(outcome, plenty)))
                wrong |= outcome.deadlocked != (name == "before") and name in ("before", "ours")
    print_table("", ("WORK", "POLICY", "SLOTS", "AT ONCE", "PREEMPTED", "THROUGHPUT"), rows)
    return wrong


def _told(outcome: Outcome, plenty: Outcome) -> tuple[str, str, str]:
    share = f"{100 * outcome.throughput / plenty.throughput:.0f} %"
    shown = f"stands still after {outcome.output_tokens} tokens" if outcome.deadlocked else share
    return str(outcome.most_at_once), str(outcome.preemptions), shown


def _random_configurations(count: int) -> tuple[int, dict[Policy, list[float]]]:
    """Return how many came to a standstill, and each one's throughput over that with plenty."""
    kept: dict[Policy, list[float]] = {policy: [] for policy in Policy}
    stuck = 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configuration=configurations())
    def judge(configuration: Configuration) -> None:
        nonlocal stuck
        for policy in Policy:
            outcome = _run(configuration, configuration.floor, policy)
            stuck += outcome.deadlocked
            plenty = _run(configuration, (_PLENTY,) * len(configuration.groups), policy)
            kept[policy].append(outcome.throughput / plenty.throughput)

    judge()
    return stuck, kept


def _run(configuration: Configuration, slots: Sequence[int], policy: Policy) -> Outcome:
    return simulate(configuration.groups, slots, configuration.limits, configuration.jobs, policy)


def _spread(kept: Sequence[float]) -> tuple[str, str, str, str]:
    lower, middle, _ = statistics.quantiles(kept, n=4)
    whole = sum(share >= 0.999 for share in kept) / len(kept)
    shown = (min(kept), lower, middle, whole)
    first, second, third, fourth = (f"{100 * share:.0f} %" for share in shown)
    return first, second, third, fourth


if __name__ == "__main__":
    sys.exit(main())
