"""Options of the benchmarks that swap under load, and a run by them."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from actors import assembly, models
from actors.hardware import choose_backend, split_backend
from orchestrator.config import Settings
from orchestrator.context import operation
from orchestrator.errors import EXIT_INTERRUPTED, ConfigError, MidflightError
from orchestrator.sources import load
from orchestrator.types import KVPolicy, TransferBackend

T = TypeVar("T")
DECODE_TOKENS = {"cpu": 192, "gpu": 2048}
"""New tokens of a request of the load: seconds of decoding, as rollouts are."""


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    at_least_one: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> argparse.Namespace:
    """Add the options that all have, and parse; exits with what is wrong.

    ``at_least_one``: further numbers; ``targets``: further files that will be written.
    """
    parser.add_argument("--warmup", type=int, default=3, help="swaps that do not count")
    parser.add_argument("--requests", default="13", help="requests decoding, e.g. 13 or 13,64")
    defaults = ", ".join(f"{count} on a {where.upper()}" for where, count in DECODE_TOKENS.items())
    parser.add_argument("--tokens", type=int, help=f"new tokens a request (default: {defaults})")
    parser.add_argument("--model", default="tiny", help="as of python -m orchestrator")
    parser.add_argument("--kv", default="recompute", choices=[k.value for k in KVPolicy])
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args(argv)
    try:
        options.requests = [int(part) for part in options.requests.split(",")]
    except ValueError:
        parser.error("--requests takes numbers, e.g. 13 or 13,64")
    if min(options.requests) < 1:
        parser.error("--requests must be at least 1")
    for name in ("warmup", "tokens", *at_least_one):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    for name in ("json", *targets):
        target: Path | None = getattr(options, name)
        if target is not None:
            try:  # now, not after minutes of measuring
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            except OSError as error:
                parser.error(f"cannot write {target}: {error.strerror}")
    return options


def routes(asked: str, gpus: int) -> list[tuple[TransferBackend, bool]]:
    """Backends to compare, by name (ConfigError for one that cannot run here)."""
    names = asked.split(",")
    if asked == "auto":
        link = choose_backend(None, gpus).value
        names = [link, f"staged-{link}", *([f"native-{link}"] if gpus else [])]
    found = []
    for name in names:
        link_name, staged = split_backend(name)
        found.append((choose_backend(link_name, gpus), staged))
    return found


def prepare(options: argparse.Namespace, backends: str) -> None:
    """Resolve what was asked for, before anything starts (ConfigError).

    ``backends``: separated by commas, or ``auto``.
    """
    settings: Settings = load(
        {
            "model": options.model,
            "backend": backends.split(",")[0],
            "kv": options.kv,
            "max_in_flight": max(options.requests),
        },
        None,
    )
    prepared = assembly.preflight(settings)
    checked = prepared.checked
    asked = options.tokens
    options.tokens = asked or DECODE_TOKENS["gpu" if checked.gpus else "cpu"]
    context = checked.max_model_len
    if settings.max_model_len is None:
        limit = int(models.read_config(checked.engine_path)["max_position_embeddings"])
        context = max(context, min(2 * options.tokens, limit))
    most = context // 2
    if asked and asked > most:
        raise ConfigError(f"--tokens {asked}: a context of {context} tokens leaves room for {most}")
    options.tokens = min(options.tokens, most)
    options.settings = settings
    options.prepared = replace(prepared, checked=replace(checked, max_model_len=context))
    options.routes = routes(backends, checked.gpus)


def run(
    name: str,
    options: argparse.Namespace,
    backends: str,
    measure: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, T]],
) -> T:
    """What ``measure`` found with the prepared options, in a folder of its own.

    Exits with one line by the benchmark's ``name``, and the error's code, if anything fails.
    """
    try:
        prepare(options, backends)
        with (
            tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder,
            operation(run_id="bench"),
        ):
            return asyncio.run(measure(options, Path(folder)))
    except MidflightError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        kept = "nothing is kept without --json"
        if options.json is not None:
            kept = f"what was measured until then is in {options.json}"
        print(f"{name}: interrupted, {kept}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
