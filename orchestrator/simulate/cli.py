"""``python -m orchestrator simulate``: parse, run, print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import EXIT_FAILED, EXIT_OK, ConfigError
from orchestrator.flags import Parser
from orchestrator.simulate.costs import CostModel
from orchestrator.simulate.faults import parse_faults
from orchestrator.simulate.report import markdown, show
from orchestrator.simulate.result import SimulationResult
from orchestrator.simulate.run import Scenario, simulate


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``simulate``; their values stay text until they are judged."""
    default = Scenario()
    parser = Parser(
        prog="midflight simulate",
        usage="python -m orchestrator simulate [--engines N] [--steps N] [--faults SPEC] [flags]",
        description="The real controller over a simulated data plane, on a virtual clock. The same "
        "flags give the same trace.",
        epilog="SPEC: KIND=COUNT or KIND=PERCENT% of all engine-steps, separated by commas; kinds "
        "crash, hang, flip, slow (slow=5x8: eight times as long), trainer-crash. Exit codes: "
        "0 done, 1 the run failed, a request was lost or an invariant broke, 2 cannot be run as "
        "asked.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--engines", default=default.engines, metavar="N", help="replicas (default 8)"
    )
    parser.add_argument(
        "--steps", default=default.steps, metavar="N", help="train steps and swaps (default 10)"
    )
    parser.add_argument(
        "--seed", default=default.seed, metavar="N", help="of faults and seconds (default 0)"
    )
    parser.add_argument("--faults", default="", metavar="SPEC", help="what fails (default nothing)")
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="a sync_latency.py JSON (default: as benchmarks/baselines/nvidia-h200-x2.json)",
    )
    parser.add_argument(
        "--requests",
        default=default.requests,
        metavar="N",
        help="requests at the same time, a replica (default 4)",
    )
    parser.add_argument(
        "--max-tokens", default=default.max_tokens, metavar="N", help="tokens a rollout (256)"
    )
    parser.add_argument(
        "--max-staleness", metavar="N", help="versions a rollout may lag (default no limit)"
    )
    parser.add_argument(
        "--recovery-attempts",
        default=default.recovery_attempts,
        metavar="N",
        help="tries before giving up, as in a run (default 3)",
    )
    parser.add_argument("--train-seconds", metavar="X", help="of one optimizer step (default 1)")
    parser.add_argument(
        "--sweep", metavar="N,N,...", help="one run for each number of engines; prints Markdown"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code. ConfigError for what cannot be run as asked."""
    parser = make_parser()
    given = parser.parse_args(list(argv))
    costs = CostModel.from_json(given.costs) if given.costs else CostModel()
    if given.train_seconds is not None:
        costs = replace(costs, train_s=_number("--train-seconds", given.train_seconds, float))
    scenario = Scenario(
        engines=_number("--engines", given.engines, int),
        steps=_number("--steps", given.steps, int),
        seed=_number("--seed", given.seed, int),
        faults=parse_faults(given.faults),
        costs=costs,
        requests=_number("--requests", given.requests, int),
        max_tokens=_number("--max-tokens", given.max_tokens, int),
        max_staleness=None
        if given.max_staleness is None
        else _number("--max-staleness", given.max_staleness, int),
        recovery_attempts=_number("--recovery-attempts", given.recovery_attempts, int),
    )
    sweep = given.sweep.split(",") if given.sweep else []
    sizes = [_number("--sweep", text, int) for text in sweep]
    scenarios = [replace(scenario, engines=size) for size in sizes] or [scenario]
    _must_be_writable(given.json)
    results: list[SimulationResult] = []
    for asked in scenarios:
        results.append(simulate(asked))
        _write(given.json, results)
    print(markdown(results)) if sizes else show(results[0])
    return EXIT_OK if all(result.ok for result in results) else EXIT_FAILED


def _number(flag: str, text: object, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{flag} {text}: not {what}") from None


def _must_be_writable(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.expanduser().parent.is_dir()):
        raise ConfigError(f"--json {path}: not a file in a folder that exists")


def _write(path: Path | None, results: Sequence[SimulationResult]) -> None:
    if path is None:
        return
    found = [result.to_json() for result in results]
    text = json.dumps(found[0] if len(found) == 1 else found, indent=1)
    try:
        path.expanduser().write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error}") from None
