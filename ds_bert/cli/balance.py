"""Predict how evenly each sampling strategy loads the ranks of a cluster, from the samples' lengths alone."""

import argparse
import json
import sys
from pathlib import Path

from ds_bert.arguments import not_negative_int, positive_int
from ds_bert.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="DIR", help="prepared data (from `ds-bert prepare`)")
    source.add_argument(
        "--lengths", metavar="FILE", help='.npy, one number a line, or JSON with "counts" of the lengths 1, 2, 3, ...'
    )
    source.add_argument("--measure", metavar="FILE", help="instead, time --model on this machine: makes a cost table")
    parser.add_argument("--world-size", type=positive_int, metavar="W", help="ranks of the cluster")
    parser.add_argument("--micro-batch-size", type=positive_int, metavar="B", help="samples a rank and micro-step")
    parser.add_argument("--accumulation", type=positive_int, default=1, metavar="G", help="micro-steps (default 1)")
    parser.add_argument("--hidden-size", type=positive_int, default=768, metavar="H", help="of the model (default 768)")
    parser.add_argument("--steps", type=positive_int, default=50, metavar="N", help="steps to plan (default 50)")
    parser.add_argument("--seed", type=not_negative_int, default=0, metavar="S", help="of the order (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--plot", metavar="FILE.png", help="draw work per rank and its distribution over steps")
    parser.add_argument("--model", default="base", metavar="NAME", help="to time with --measure (default base)")
    keys = parser.add_argument_group('keys of the section "ds_bert.sampling", each for the strategy that has it')
    keys.add_argument("--cost-model", default="flops", metavar="M", help="tokens, flops (default) or a --measure file")
    keys.add_argument("--window", type=positive_int, metavar="N", help="local_sort: micro-steps sorted together")
    keys.add_argument("--window-scope", choices=("rank", "world"), help="local_sort: who sorts a window")
    keys.add_argument("--edges", metavar="N,N,...", help="stratified: tokens at which strata end")
    keys.add_argument("--strata", type=positive_int, metavar="N", help="stratified: strata of equally many samples")
    keys.add_argument("--no-equal-counts", action="store_true", help="balanced: ranks may get different counts")
    keys.add_argument(
        "--max-tokens-per-micro-batch", type=positive_int, metavar="T", help="balanced: fill up to T tokens"
    )


def run(args: argparse.Namespace) -> int:
    if args.measure:
        return _measure(args)
    if args.world_size is None or args.micro_batch_size is None:
        raise UsageError("give --world-size and --micro-batch-size")
    if args.plot is not None:
        if not Path(args.plot).suffix:
            raise UsageError(f"--plot {args.plot}: give the picture an ending, such as .png")
        _check_folder("--plot", args.plot)
    from ds_bert.planning import read_lengths, recommend, simulate
    from ds_bert.sampling import STRATEGIES, as_lengths, cost_table

    if args.data:
        from ds_bert.data.prepared import PreparedData

        lengths = PreparedData(args.data).train.lengths
    else:
        lengths = read_lengths(args.lengths)
    lengths = as_lengths(lengths)
    table = cost_table(args.cost_model, int(lengths.max()), hidden_size=args.hidden_size)
    options = _options(args)
    reports = {}
    for strategy in STRATEGIES:
        print(f"planning {args.steps} steps of {strategy}", file=sys.stderr)
        reports[strategy] = simulate(
            lengths,
            table,
            steps=args.steps,
            world_size=args.world_size,
            micro_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=args.accumulation,
            hidden_size=args.hidden_size,
            seed=args.seed,
            strategy=strategy,
            cost_model=args.cost_model,
            **options.get(strategy, {}),
        )
    report = {
        "source": args.data or args.lengths,
        "samples": len(lengths),
        "mean_length": float(lengths.mean()),
        "world_size": args.world_size,
        "micro_batch_size": args.micro_batch_size,
        "accumulation": args.accumulation,
        "cost_model": args.cost_model,
        "hidden_size": args.hidden_size,
        "options": options,
        "strategies": {name: result.as_dict() for name, result in reports.items()},
        "recommendation": recommend(reports),
    }
    if args.plot:
        _plot(args, reports)
    print(json.dumps(report) if args.json else _as_text(report))
    return 0


def _options(args: argparse.Namespace) -> dict[str, dict]:
    """The keys given, by the strategy they belong to."""
    edges = None
    if args.edges is not None:
        try:
            edges = [int(edge) for edge in args.edges.split(",")]
        except ValueError:
            raise UsageError(f"--edges {args.edges}: must be whole numbers with commas, such as 128,256,512") from None
    given = {
        "local_sort": {"window": args.window, "window_scope": args.window_scope},
        "stratified": {"edges": edges, "strata": args.strata},
        "balanced": {
            "equal_counts": False if args.no_equal_counts else None,
            "max_tokens_per_micro_batch": args.max_tokens_per_micro_batch,
        },
    }
    chosen = {name: {key: v for key, v in keys.items() if v is not None} for name, keys in given.items()}
    return {name: keys for name, keys in chosen.items() if keys}


def _plot(args: argparse.Namespace, reports: dict) -> None:
    from ds_bert.planning import plot_balance

    title = f"{args.world_size:,} ranks × {args.micro_batch_size} samples"
    if args.accumulation > 1:
        title += f" × {args.accumulation} micro-steps"
    try:
        plot_balance(reports, args.plot, f"{title}, {Path(args.data or args.lengths).name}, cost: {args.cost_model}")
    except ValueError as error:  # matplotlib knows no such format
        raise UsageError(f"--plot {args.plot}: {error}") from None
    print(f"picture: {args.plot}", file=sys.stderr)


def _as_text(report: dict) -> str:
    rows = [
        f"{report['samples']:,} samples, mean length {report['mean_length']:.1f}; {report['world_size']:,} ranks x "
        f"{report['micro_batch_size']} samples x {report['accumulation']} micro-steps; cost model "
        f"{report['cost_model']}",
        "",
        "                 packed: most work / mean   padded: time / ideal      padding   peak tokens         planning",
        "strategy           mean     p99   worst      mean     p99   worst               packed padded  ms/step     MB",
    ]
    for name, result in report["strategies"].items():
        packed, padded = result["packed"], result["padded"]
        figures = [packed["max_over_mean" + end] for end in ("", "_p99", "_worst")]
        figures += [padded["time_over_ideal" + end] for end in ("", "_p99", "_worst")]
        columns = "  ".join(f"{figure:6.3f}" for figure in figures[:3])
        columns += "    " + "  ".join(f"{figure:6.3f}" for figure in figures[3:])
        columns += f"   {padded['padding_share']:6.1%}  {packed['peak_tokens']:7,} {padded['peak_tokens']:6,}"
        rows.append(f"{name:<15}  {columns}  {result['plan_ms_per_step']:7.3f}  {result['plan_memory_mb']:5.0f}")
    return "\n".join([*rows, "", report["recommendation"]])


def _check_folder(option: str, file: str) -> None:
    """Before the work whose result goes there."""
    if not Path(file).parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {Path(file).parent}")


def _measure(args: argparse.Namespace) -> int:
    _check_folder("--measure", args.measure)
    from ds_bert.accelerator.device import choose_device

    choose_device()
    from ds_bert.planning.measure import measure_costs

    table = measure_costs(args.model, micro_batch_size=args.micro_batch_size or 8)
    Path(args.measure).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table) if args.json else f"cost table: {args.measure}")
    return 0
