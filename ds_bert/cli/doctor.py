"""Find out in seconds whether a job would run on these machines, and what to do if not."""

import argparse
import dataclasses
import json
import os

from ds_bert.accelerator.device import choose_device
from ds_bert.arguments import add_trust_remote_code
from ds_bert.cli.machines import add_machines_arguments, find_machines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_machines_arguments(parser)
    job = parser.add_argument_group("what it is to run (each is looked at if it is given)")
    job.add_argument("--data", metavar="DIR", help="prepared data: there, and the same on all hosts")
    job.add_argument("--deepspeed_config", metavar="FILE", help="whose ops are compiled")
    job.add_argument("--model", metavar="NAME", help="with --data and --deepspeed_config: whether it fits into memory")
    job.add_argument("--output", metavar="DIR", help="run folder: space, permission, shared by all hosts")
    add_trust_remote_code(job)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    choose_device()
    machines = find_machines(args)
    from ds_bert.doctor.examination import examine
    from ds_bert.doctor.facts import Questions
    from ds_bert.doctor.findings import FAILED, WARNING

    ops, memory = _look_at_job(args, machines.world_size)
    # On other hosts commands start in the home folder.
    data, output = (path and os.path.abspath(path) for path in (args.data, args.output))
    questions = Questions(os.getcwd(), data, output, args.master_port, ops)
    findings = []
    for finding in examine(machines, questions, memory):
        findings.append(finding)
        if not args.json:
            _print(finding)
    failed = sum(finding.level == FAILED for finding in findings)
    warnings = sum(finding.level == WARNING for finding in findings)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": list(map(dataclasses.asdict, findings))}, indent=2))
    else:
        verdict = "The job would fail." if failed else "The job can run."
        print(f"{verdict} {failed} failed, {warnings} warnings, {len(findings) - failed - warnings} ok.")
    return 1 if failed else 0


def _look_at_job(args: argparse.Namespace, world_size: int) -> tuple:
    """Names of the ops to compile, and the memory of a rank, as far as the options tell."""
    if not args.deepspeed_config:
        return (), None
    from ds_bert.accelerator.compiled_ops import needed_ops
    from ds_bert.config import parse_section, read_json

    config = read_json(args.deepspeed_config)
    section = parse_section(config, args.deepspeed_config)
    ops = tuple(needed_ops(config))
    if not (args.data and args.model):
        return ops, None
    import torch

    from ds_bert.data.prepared import PreparedData
    from ds_bert.doctor.memory import estimate_memory
    from ds_bert.modeling import build_model, load_config
    from ds_bert.resolution import resolve_batch_sizes

    data = PreparedData(args.data)
    tokenizer = data.load_tokenizer(trust_remote_code=args.trust_remote_code)
    lengths = data.train.lengths
    model_config = load_config(args.model, tokenizer, int(lengths.max()), trust_remote_code=args.trust_remote_code)
    _, micro_batch_size, _ = resolve_batch_sizes(config, world_size)
    tokens = int(micro_batch_size * (lengths.mean() if section.execution.packed else lengths.max()))
    with torch.device("meta"):
        model = build_model(args.model, model_config, from_config=True, trust_remote_code=args.trust_remote_code)
    return ops, estimate_memory(model, config, section, tokens=tokens, world_size=world_size)


def _print(finding) -> None:
    where = f"{finding.host}: " if finding.host else ""
    print(f"{finding.level:<8} {finding.check:<14} {where}{finding.text}", flush=True)
    if finding.mend:
        print(f"{'':<8} {'':<14} -> {finding.mend}", flush=True)
