"""`hostprep doctor`: what stands in the way on this node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hostprep.api.pool_spec import PoolSpec
from hostprep.cli.options import output_option, pool_options, root_option, specs_from
from hostprep.console import print_json, print_table, say, terminal_width, wrapped
from hostprep.errors import BadInputError
from hostprep.node.apply.service import Node
from hostprep.node.doctor import Finding, diagnose, worst_first
from hostprep.node.doctor.finding import NOTHING_TO_DO
from hostprep.node.observe import HostRoot, observe

_TABLE_CHARS = 200
"""What the table takes; on a narrower terminal a remedy has lines of its own, to be copied."""


@click.command(short_help="Say what stands in the way here, each with its remedy.")
@pool_options
@click.option("--gpu", is_flag=True, help="What registering with CUDA takes here, too.")
@root_option
@output_option
def doctor(root: str, output: str, *, gpu: bool, **options: Any) -> int:
    """Say what on this node stands in the way, worst first, each with its remedy.

    With a pool (-f, or POOL and --size) it is checked as well. Exit code 1 if anything is an
    error.
    """
    names_pool = any(options[key] is not None for key in ("file", "pool", "pool_option"))
    specs = specs_from(options) if names_pool else ()
    findings = _findings(Node(root), specs, gpu=gpu)
    if output == "json":
        print_json({"findings": findings})
    elif terminal_width() < _TABLE_CHARS:
        for finding in findings:
            indented = " " * 9
            first = f"{finding.severity:<8} {finding.check}: {finding.what}"
            say(wrapped(first, begin="", then=indented))
            if finding.remedy != NOTHING_TO_DO:
                say(wrapped(finding.remedy, begin=f"{indented}-> ", then=indented))
    else:
        print_table(
            "",
            ("SEVERITY", "CHECK", "FOUND", "REMEDY"),
            [(f.severity, f.check, f.what, f.remedy) for f in findings],
            flexible=("FOUND", "REMEDY"),
        )
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _findings(node: Node, specs: Sequence[PoolSpec], *, gpu: bool) -> tuple[Finding, ...]:
    try:
        facts = node.facts()
    except BadInputError:  # a root that is refused: the check of the root says why
        facts = observe(host=HostRoot(), root=node.root)
    findings = diagnose(facts, specs)
    if not gpu:
        return findings
    from hostprep.node.doctor.gpus import check_registering
    from hostprep.node.observe.gpus import observe_nvidia, query_cuda

    nvidia = observe_nvidia(HostRoot(), facts.gpus, query=query_cuda)
    return worst_first((*findings, *check_registering(facts, nvidia, specs)))
