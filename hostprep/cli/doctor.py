"""`hostprep doctor`: what stands in the way on this node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hostprep.api.pool_spec import PoolSpec
from hostprep.cli.options import output_option, pool_options, root_option, specs_from
from hostprep.console import print_json, print_table
from hostprep.node.apply.service import Node
from hostprep.node.doctor import Finding, diagnose, worst_first


@click.command(short_help="Say what stands in the way here, each with its remedy.")
@pool_options
@click.option("--gpu", is_flag=True, help="What registering with CUDA takes here, too.")
@root_option
@output_option
def doctor(root: str, output: str, *, gpu: bool, **options: Any) -> int:
    """Say what on this node stands in the way, worst first, each with its remedy.

    With a pool (-f, or --name and --size) it is checked as well. Exit code 1 if anything is an
    error.
    """
    specs = specs_from(options) if options.get("file") or options.get("name") else ()
    findings = _findings(Node(root), specs, gpu=gpu)
    if output == "json":
        print_json({"findings": findings})
    else:
        print_table(
            "",
            ("SEVERITY", "CHECK", "FOUND", "REMEDY"),
            [(f.severity, f.check, f.what, f.remedy) for f in findings],
        )
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _findings(node: Node, specs: Sequence[PoolSpec], *, gpu: bool) -> tuple[Finding, ...]:
    facts = node.facts()
    findings = diagnose(facts, specs)
    if not gpu:
        return findings
    from hostprep.node.doctor.gpus import check_registering
    from hostprep.node.observe import HostRoot
    from hostprep.node.observe.gpus import observe_nvidia, query_cuda

    nvidia = observe_nvidia(HostRoot(), facts.gpus, query=query_cuda)
    return worst_first((*findings, *check_registering(facts, nvidia, specs)))
