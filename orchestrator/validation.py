"""The proof of a swap, at three depths.

digest: the bytes each replica received equal the bytes that were sent, tensor by tensor.
canary: log-probabilities of fixed prompts on each replica equal those of the trainer's own
    model within a tolerance. Control: the same comparison on the weights that the engines
    were started with, before any swap. It says how far the two implementations differ by
    themselves; where that is too far, the canary can tell nothing: *inconclusive*. Where the
    trainer's own are not finite, training diverged.
fresh: an engine started from the checkpoint of the sent weights continues each probe that the
    swap cut, from prompt + old tokens, and must write the same new tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import (
    ChannelError,
    ConfigError,
    EngineError,
    TrainingDiverged,
    TransferError,
    ValidationFailed,
)
from orchestrator.fleet import Fleet
from orchestrator.options import ValidationOptions
from orchestrator.protocols import Digests, Engine, EngineFactory, Scorer
from orchestrator.tasks import all_or_first_error, uninterrupted
from orchestrator.types import (
    UNUSED,
    CheckResult,
    Completion,
    PolicyVersion,
    Prompt,
    RequestKind,
    Rollout,
    Verdict,
    WeightUpdate,
)

Logprobs = Sequence[Sequence[float]]

CONTROL_MAX = 2.0
"""Times the tolerance that the control may differ, where a swap's limit follows it."""
DIVERGED = "a log-probability that the trainer computes with its own weights is not finite"
FRESH_CLOSE_S = 15.0
"""Seconds for a fresh engine to close; nothing waits for it but the verdict."""


def compare_digests(sent: Digests, received: Mapping[str, Digests], nbytes: int) -> CheckResult:
    """Every replica has every tensor that was sent, bit for bit, and no other.

    Tensors that its model has no place for are listed, and prove nothing.
    """
    differing = [
        {"engine": engine, "tensor": name, "sent": sent.get(name), "received": got.get(name)}
        for engine, got in received.items()
        for name in sorted(sent.keys() | got.keys())
        if sent.get(name) != got.get(name) and not (name in sent and got.get(name) == UNUSED)
    ]
    unused = sorted({n for got in received.values() for n, d in got.items() if d == UNUSED})
    used = bool(received) and all(any(d != UNUSED for d in g.values()) for g in received.values())
    ok = bool(sent) and used and not differing
    return CheckResult(
        "digest",
        Verdict.MATCH if ok else Verdict.MISMATCH,
        {
            "tensors": len(sent),
            "bytes": nbytes,
            "engines": sorted(received),
            "differing": differing,
            "unused": unused,
        },
    )


def largest_difference(left: Logprobs, right: Logprobs) -> float:
    """Largest absolute difference; infinity where the shapes differ or a value is not a number."""
    if len(left) != len(right):
        return float("inf")
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if len(a) != len(b):
            return float("inf")
        for x, y in zip(a, b, strict=True):
            difference = abs(x - y)
            if not difference <= worst:  # also true for nan
                worst = difference if difference == difference else float("inf")
    return worst


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a fresh engine must write: ``tokens`` after ``context``."""

    request_id: str
    prompt: str
    context: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str


def expectations(probes: Sequence[Rollout], version: PolicyVersion) -> list[Expectation]:
    """The tokens of ``version`` at the end of each probe, and what preceded them."""
    found = []
    for probe in probes:
        spans = probe.completion.spans
        if not spans or spans[-1].version != version:
            continue
        start = spans[-1].start
        texts = probe.completion.span_texts
        found.append(
            Expectation(
                probe.request.request_id,
                probe.request.prompt.text,
                probe.request.prompt.token_ids + probe.completion.token_ids[:start],
                probe.completion.token_ids[start:],
                texts[-1] if texts else "",
            )
        )
    return found


def diverging(expected: Expectation, actual: Completion) -> dict[str, object] | None:
    """The first token that differs, with both sides; None when all are equal."""
    if expected.tokens == actual.token_ids:
        return None
    pairs = zip(expected.tokens, actual.token_ids, strict=False)
    at = next((i for i, (e, a) in enumerate(pairs) if e != a), None)
    if at is None:
        at = min(len(expected.tokens), len(actual.token_ids))
    return {
        "request_id": expected.request_id,
        "prompt": expected.prompt,
        "token": at,
        "expected_id": expected.tokens[at] if at < len(expected.tokens) else None,
        "actual_id": actual.token_ids[at] if at < len(actual.token_ids) else None,
        "expected_text": expected.text,
        "actual_text": actual.text,
    }


class Validator:
    """Runs the checks of one run. ``scorer`` is None where the trainer cannot score."""

    def __init__(
        self,
        options: ValidationOptions,
        fleet: Fleet,
        *,
        scorer: Scorer | None = None,
        factory: EngineFactory | None = None,
        canary_prompts: Sequence[Prompt] = (),
    ) -> None:
        self.options = options
        self._fleet = fleet
        self.scorer = scorer
        self._factory = factory
        self._canary = [p.token_ids for p in canary_prompts if len(p.token_ids) > 1]
        self._control: float | None = None
        if options.canary and (scorer is None or not self._canary):
            raise ConfigError(
                "the canary check needs a trainer that scores (reference_logprobs) and a prompt "
                "of two tokens or more; leave it out with ValidationOptions(canary=False)"
            )
        if options.fresh and factory is None:
            raise ConfigError(
                "the fresh check needs an engine factory; leave it out with "
                "ValidationOptions(fresh=False)"
            )

    async def control(self) -> None:
        """Compare engines and trainer on the weights that the engines were started with."""
        if self.options.canary:
            self._control = await self._difference(initial=True)

    async def _difference(self, *, initial: bool = False) -> float:
        """The largest of any engine; nan where the trainer's own are not finite."""
        assert self.scorer is not None
        scorer = self.scorer

        async def reference() -> dict[str, Logprobs]:
            return {"trainer": await scorer.reference_logprobs(self._canary, initial=initial)}

        async def engines() -> dict[str, Logprobs]:
            return dict(await self._fleet.prompt_logprobs(self._canary))

        scored, written = await all_or_first_error([reference(), engines()])
        expected = [len(prompt) - 1 for prompt in self._canary]
        if [len(row) for row in scored["trainer"]] != expected:
            return float("inf")  # two sides that both say nothing would agree
        if not all(math.isfinite(x) for row in scored["trainer"] for x in row):
            return math.nan
        differences = [largest_difference(scored["trainer"], got) for got in written.values()]
        return max(differences, default=float("inf"))

    async def digest(self, update: WeightUpdate, sent: Digests, nbytes: int) -> CheckResult:
        """See the module. Whoever has every tensor as sent is marked as proved; a replica that is
        to be admitted is never left out."""
        here = self._fleet.here
        if not self.options.digest and not any(r.fenced for r in here):
            for replica in here:
                replica.proved = update.version
            return CheckResult("digest", Verdict.SKIPPED)
        try:
            received = await self._fleet.digests(update)
        except ChannelError:
            raise
        except TransferError as error:
            # The replica answered, and what it says of its weights is no proof of them.
            detail = {
                "tensors": len(sent),
                "bytes": nbytes,
                "engines": [],
                "differing": [],
                "unused": [],
                "reason": str(error),
            }
            return CheckResult("digest", Verdict.MISMATCH, detail)
        for replica in self._fleet.named(received):
            one = compare_digests(sent, {replica.name: received[replica.name]}, nbytes)
            if one.verdict is Verdict.MATCH:
                replica.proved, replica.shown = update.version, received[replica.name]
        return compare_digests(sent, received, nbytes)

    def proved(self, sent: Digests, nbytes: int) -> CheckResult:
        """The digest check over what every serving replica showed last, each at its own time."""
        if not self.options.digest:
            return CheckResult("digest", Verdict.SKIPPED)
        shown = {r.name: r.shown if r.proved else {} for r in self._fleet.serving}
        return compare_digests(sent, shown, nbytes)

    async def canary(self) -> CheckResult:
        """See the module."""
        if not self.options.canary:
            return CheckResult("canary", Verdict.SKIPPED)
        tolerance = self.options.canary_tolerance
        difference = await self._difference()
        factor = self.options.canary_control_factor
        most = tolerance * (CONTROL_MAX if factor else 1.0)
        control_ok = self._control is not None and self._control <= most
        if self._control is not None and control_ok:
            # Rounding errors vary with the weights, and so does what a right engine differs by.
            tolerance = max(tolerance, factor * self._control)
        diverged = math.isnan(difference) and not math.isnan(self._control or 0.0)
        if diverged:
            verdict = Verdict.MISMATCH
        elif difference <= tolerance and control_ok:
            verdict = Verdict.MATCH
        else:
            verdict = Verdict.MISMATCH if control_ok else Verdict.INCONCLUSIVE
        return CheckResult(
            "canary",
            verdict,
            {
                "prompts": len(self._canary),
                "max_abs_diff": _finite(difference),
                "tolerance": tolerance,
                "control": Verdict.MATCH if control_ok else Verdict.MISMATCH,
                "control_max_abs_diff": _finite(self._control),
                **({"reason": DIVERGED} if diverged else {}),
            },
        )

    async def fresh(
        self, checkpoint: str, probes: Sequence[Rollout], version: PolicyVersion
    ) -> CheckResult:
        """See the module. ``probes`` are greedy and ended; those without new tokens are skipped."""
        wanted = expectations(probes, version)
        if not wanted:
            return CheckResult(
                "fresh",
                Verdict.INCONCLUSIVE,
                {"prompts": 0, "passed": 0, "reason": f"no probe has tokens of version {version}"},
            )
        assert self._factory is not None
        engine = await self._factory(checkpoint)
        try:
            await engine.start()
            by_id = {p.request.request_id: p.request for p in probes}
            written = await all_or_first_error(
                [
                    engine.generate(
                        replace(
                            by_id[w.request_id],
                            request_id=f"fresh-{w.request_id}",
                            prompt=Prompt(w.context),
                            max_tokens=len(w.tokens),
                            kind=RequestKind.PROBE,
                        )
                    )
                    for w in wanted
                ]
            )
        finally:
            await uninterrupted(_close(engine))  # a cancel must leave no process behind
        failures = [d for w, c in zip(wanted, written, strict=True) if (d := diverging(w, c))]
        passed = len(wanted) - len(failures)
        rate = passed / len(wanted)
        return CheckResult(
            "fresh",
            Verdict.MATCH if rate >= self.options.min_pass_rate else Verdict.MISMATCH,
            {
                "prompts": len(wanted),
                "passed": passed,
                "pass_rate": rate,
                "required": self.options.min_pass_rate,
                "not_cut": len(probes) - len(wanted),
                "tokens": sum(len(w.tokens) for w in wanted),
                "checkpoint": checkpoint,
                "diverging": failures,
            },
        )


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(FRESH_CLOSE_S):
            await engine.aclose()
    except TimeoutError:
        raise EngineError(
            engine.name, f"did not close within {FRESH_CLOSE_S:g} s: look for its processes"
        ) from None


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; None says that the two sides could not be compared."""
    return value if value is not None and math.isfinite(value) else None


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "more than can be compared"


def failure(result: CheckResult, step: int) -> ValidationFailed:
    """The error for a mismatch in the weights of ``step``."""
    if result.check == "canary" and "reason" in result.detail:
        return TrainingDiverged(
            f"training diverged at step {step}: {result.detail['reason']}; lower the learning rate"
        )
    return ValidationFailed(explain(result))


def explain(result: CheckResult) -> str:
    """One line for a mismatch: what differs, and what to look at."""
    detail = result.detail
    if result.check == "digest":
        if "reason" in detail:
            return f"digest: {detail['reason']}. Do not serve this version; resync whole"
        differing = detail["differing"]
        assert isinstance(differing, list)
        names = ", ".join(f"{d['tensor']} on {d['engine']}" for d in differing[:5])
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        return (
            f"digest: {len(differing)} of {detail['tensors']} tensors are not what was sent: "
            f"{names or 'nothing was digested'}{more}. Do not serve this version; resync whole"
        )
    if result.check == "canary":
        if "reason" in detail:
            return f"canary: {detail['reason']}"
        return (
            f"canary: log-probabilities differ by {_shown(detail['max_abs_diff'])}, tolerance "
            f"{detail['tolerance']:.3g}, though the control agreed within "
            f"{_shown(detail['control_max_abs_diff'])}: the engine does not run the sent weights"
        )
    failures = detail["diverging"]
    assert isinstance(failures, list)
    if not failures:
        return f"fresh: {detail}"
    d = failures[0]
    return (
        f"fresh: {detail['passed']} of {detail['prompts']} probes match a fresh engine, required "
        f"{detail['required']:.0%}. First: {d['prompt']!r} diverges at new token {d['token']}: "
        f"{d['expected_id']} in {d['expected_text']!r} here, "
        f"{d['actual_id']} in {d['actual_text']!r} there"
    )
