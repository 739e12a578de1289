"""What counts as proof, what does not, and what a mismatch tells."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from orchestrator.errors import ConfigError, EngineError, TrainingDiverged
from orchestrator.fleet import Fleet
from orchestrator.options import ValidationOptions
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, fake_engine_factory
from orchestrator.types import (
    UNUSED,
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    RequestKind,
    Rollout,
    TokenSpan,
    Verdict,
)
from orchestrator.validation import (
    Validator,
    compare_digests,
    diverging,
    expectations,
    explain,
    failure,
    largest_difference,
)
from tests.harness import PROMPTS


def probe(tokens: Sequence[int], *spans: tuple[int, int, int], request_id: str = "p0") -> Rollout:
    return Rollout(
        GenerationRequest(
            request_id, Prompt((7, 8), "seven"), 64, temperature=0.0, kind=RequestKind.PROBE
        ),
        Completion(
            request_id,
            "engine-0",
            tuple(tokens),
            (0.0,) * len(tokens),
            tuple(TokenSpan(PolicyVersion(v), a, b) for v, a, b in spans),
            FinishReason.LENGTH,
            span_texts=tuple(f"span {v}" for v, _, _ in spans),
        ),
    )


# Digest


def test_a_tensor_that_the_model_has_no_place_for_is_listed_and_proves_nothing() -> None:
    sent = {"a": "1", "tied": "2"}
    result = compare_digests(sent, {"e0": {"a": "1", "tied": UNUSED}}, 64)
    assert (result.verdict, result.detail["unused"]) == (Verdict.MATCH, ["tied"])
    nothing = {"e0": {"a": UNUSED, "tied": UNUSED}, "e1": dict(sent)}
    assert compare_digests(sent, nothing, 64).verdict is Verdict.MISMATCH
    unasked = {"e0": {**sent, "other": UNUSED}}
    assert compare_digests(sent, unasked, 64).verdict is Verdict.MISMATCH


def test_equal_digests_on_every_engine_match() -> None:
    sent = {"a": "1", "b": "2"}
    result = compare_digests(sent, {"e0": dict(sent), "e1": dict(sent)}, 64)
    assert (result.verdict, result.detail["tensors"], result.detail["bytes"]) == (
        Verdict.MATCH,
        2,
        64,
    )


@pytest.mark.parametrize(
    ("received", "tensor"),
    [({"a": "1", "b": "X"}, "b"), ({"a": "1"}, "b"), ({"a": "1", "b": "2", "c": "3"}, "c")],
    ids=["changed", "missing", "extra"],
)
def test_one_tensor_that_differs_is_named_with_its_engine(
    received: dict[str, str], tensor: str
) -> None:
    sent = {"a": "1", "b": "2"}
    result = compare_digests(sent, {"e0": dict(sent), "e1": received}, 64)
    assert result.verdict is Verdict.MISMATCH
    assert f"1 of 2 tensors are not what was sent: {tensor} on e1" in explain(result)


@pytest.mark.parametrize(
    ("sent", "received"), [({}, {"e0": {}}), ({"a": "1"}, {}), ({}, {})], ids=str
)
def test_nothing_compared_is_no_match(
    sent: dict[str, str], received: dict[str, dict[str, str]]
) -> None:
    result = compare_digests(sent, received, 0)
    assert result.verdict is Verdict.MISMATCH
    assert "nothing was digested" in explain(result)


def test_many_differing_tensors_are_summed_up() -> None:
    sent = {f"t{i}": "1" for i in range(9)}
    result = compare_digests(sent, {"e0": {}}, 0)
    assert "t4 on e0 and 4 more" in explain(result)


# Canary


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        (((0.0, -1.0),), ((0.0, -1.5),), 0.5),
        (((0.0,), (-2.0,)), ((0.25,), (-2.0,)), 0.25),
        (((0.0,),), ((0.0,), (0.0,)), math.inf),
        (((0.0, 0.0),), ((0.0,),), math.inf),
        (((math.nan,),), ((0.0,),), math.inf),
        (((0.0, math.nan, 5.0),), ((0.0, math.nan, 5.0),), math.inf),
        (((-math.inf,),), ((-math.inf,),), math.inf),
        ((), (), 0.0),
    ],
)
def test_the_largest_difference_never_hides_a_hole(
    left: tuple[tuple[float, ...], ...], right: tuple[tuple[float, ...], ...], difference: float
) -> None:
    assert largest_difference(left, right) == difference
    assert largest_difference(right, left) == difference


class Parts:
    """A validator over two fake engines and a fake trainer that has staged ``initial``."""

    def __init__(
        self, options: ValidationOptions, offsets: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.world = FakeWorld()
        self.trainer = FakeTrainer(self.world)
        self.engines = [
            FakeEngine(f"engine-{i}", self.world, logprob_offset=o) for i, o in enumerate(offsets)
        ]
        self.fleet = Fleet(self.engines)
        self.validator = Validator(
            options,
            self.fleet,
            scorer=self.trainer,
            factory=fake_engine_factory(self.trainer),
            canary_prompts=PROMPTS,
        )

    async def start(self, *, same_weights: bool) -> None:
        await self.fleet.start()
        await self.trainer.start()
        if same_weights:
            self.trainer.weights = dict(self.trainer.initial)
        await self.trainer.stage(PolicyVersion(1))


Scores = Callable[..., Awaitable[tuple[tuple[float, ...], ...]]]


def spoiled(trainer: FakeTrainer, bad: float) -> Scores:
    """Its ``reference_logprobs``, with ``bad`` as the last number of all."""
    score = trainer.reference_logprobs

    async def scores(
        prompts: Sequence[Sequence[int]], *, initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        *rows, last = await score(prompts, initial=initial)
        return (*rows, (*last[:-1], bad))

    return scores


CANARY = ValidationOptions(digest=False, canary=True, fresh=False, canary_tolerance=1e-3)


async def test_engines_that_agree_with_the_trainer_pass_the_canary() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    await parts.validator.control()
    result = await parts.validator.canary()
    assert (result.verdict, result.detail["control"]) == (Verdict.MATCH, Verdict.MATCH)
    assert result.detail["prompts"] == len(PROMPTS)


async def test_a_swap_that_did_not_change_the_engine_fails_the_canary() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=False)
    await parts.validator.control()
    result = await parts.validator.canary()
    assert result.verdict is Verdict.MISMATCH
    assert "the engine does not run the sent weights" in explain(result)


async def test_one_wrong_engine_among_right_ones_fails_the_canary() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    await parts.validator.control()
    parts.engines[1].logprob_offset = 0.01
    result = await parts.validator.canary()
    assert result.verdict is Verdict.MISMATCH
    assert result.detail["max_abs_diff"] == pytest.approx(0.01)


@pytest.mark.parametrize("same_weights", [True, False])
async def test_a_canary_whose_control_failed_can_tell_nothing(same_weights: bool) -> None:
    parts = Parts(CANARY, offsets=(0.0, 0.5))
    await parts.start(same_weights=same_weights)
    await parts.validator.control()
    result = await parts.validator.canary()
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.detail["control"] is Verdict.MISMATCH
    assert result.detail["control_max_abs_diff"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("control", "swapped", "verdict"),
    [
        (0.0, 0.0009, Verdict.MATCH),
        (0.0, 0.0011, Verdict.MISMATCH),
        (0.0015, 0.0029, Verdict.MATCH),
        (0.0015, 0.0031, Verdict.MISMATCH),
        (0.0019, 0.0, Verdict.MATCH),
        (0.0021, 0.0, Verdict.INCONCLUSIVE),
    ],
)
async def test_what_a_swap_may_differ_by_follows_the_control(
    control: float, swapped: float, verdict: Verdict
) -> None:
    parts = Parts(replace(CANARY, canary_control_factor=2.0), offsets=(0.0, control))
    await parts.start(same_weights=True)
    await parts.validator.control()
    parts.engines[1].logprob_offset = swapped
    assert (await parts.validator.canary()).verdict is verdict


@pytest.mark.parametrize(
    ("control", "swapped", "verdict"),
    [
        (0.0009, 0.0009, Verdict.MATCH),
        (0.0009, 0.0011, Verdict.MISMATCH),
        (0.0011, 0.0, Verdict.INCONCLUSIVE),
    ],
)
async def test_without_the_factor_the_tolerance_is_the_limit_of_both(
    control: float, swapped: float, verdict: Verdict
) -> None:
    parts = Parts(CANARY, offsets=(0.0, control))
    await parts.start(same_weights=True)
    await parts.validator.control()
    parts.engines[1].logprob_offset = swapped
    assert (await parts.validator.canary()).verdict is verdict


async def test_a_canary_without_a_control_is_inconclusive() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    assert (await parts.validator.canary()).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
async def test_a_trainer_whose_own_log_probabilities_are_not_finite_diverged(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    await parts.validator.control()
    monkeypatch.setattr(parts.trainer, "reference_logprobs", spoiled(parts.trainer, bad))
    result = await parts.validator.canary()
    assert result.verdict is Verdict.MISMATCH
    assert "the engine" not in explain(result)
    error = failure(result, 7)
    assert isinstance(error, TrainingDiverged)
    assert re.search("training diverged at step 7: .* is not finite; lower the", str(error))


async def test_a_trainer_that_never_scored_in_numbers_can_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(CANARY)
    monkeypatch.setattr(parts.trainer, "reference_logprobs", spoiled(parts.trainer, -math.inf))
    await parts.start(same_weights=True)
    await parts.validator.control()
    assert (await parts.validator.canary()).verdict is Verdict.INCONCLUSIVE


async def test_an_engine_that_writes_no_numbers_is_to_blame_itself() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    await parts.validator.control()
    parts.engines[1].logprob_offset = math.nan
    result = await parts.validator.canary()
    assert result.verdict is Verdict.MISMATCH
    assert not isinstance(failure(result, 7), TrainingDiverged)
    assert "the engine does not run the sent weights" in str(failure(result, 7))


async def test_an_engine_that_fails_in_the_canary_is_heard_in_its_own_words() -> None:
    parts = Parts(CANARY)
    await parts.start(same_weights=True)
    parts.world.faults.fail(
        "engine-1", "prompt_logprobs", error=EngineError("engine-1", "out of memory")
    )
    with pytest.raises(EngineError, match="engine-1: out of memory"):
        await parts.validator.canary()


async def test_a_canary_that_compared_no_number_is_no_match() -> None:
    class Silent(FakeTrainer):
        async def reference_logprobs(
            self, prompts: Sequence[Sequence[int]], *, initial: bool = False
        ) -> tuple[tuple[float, ...], ...]:
            return ()

    class Mute(FakeEngine):
        async def prompt_logprobs(
            self, prompts: Sequence[Sequence[int]]
        ) -> tuple[tuple[float, ...], ...]:
            return ()

    world = FakeWorld()
    fleet = Fleet([Mute("engine-0", world)])
    validator = Validator(CANARY, fleet, scorer=Silent(world), canary_prompts=PROMPTS)
    await validator.control()
    assert (await validator.canary()).verdict is not Verdict.MATCH


def test_a_canary_without_a_scorer_or_prompt_is_refused_with_a_hint() -> None:
    world = FakeWorld()
    fleet = Fleet([FakeEngine("engine-0", world)])
    with pytest.raises(ConfigError, match=r"ValidationOptions\(canary=False"):
        Validator(CANARY, fleet, canary_prompts=PROMPTS)
    with pytest.raises(ConfigError, match="two tokens or more"):
        Validator(CANARY, fleet, scorer=FakeTrainer(world), canary_prompts=[Prompt((1,))])


async def test_a_check_that_is_off_is_skipped_not_passed() -> None:
    off = ValidationOptions(digest=False, canary=False, fresh=False)
    validator = Validator(off, Fleet([FakeEngine("engine-0", FakeWorld())]))
    assert (await validator.canary()).verdict is Verdict.SKIPPED


# Fresh


def test_a_cut_probe_owes_the_tokens_after_its_last_cut() -> None:
    (wanted,) = expectations([probe((1, 2, 3, 4, 5), (0, 0, 2), (1, 2, 5))], PolicyVersion(1))
    assert (wanted.context, wanted.tokens, wanted.text) == ((7, 8, 1, 2), (3, 4, 5), "span 1")


def test_a_probe_without_tokens_of_the_version_owes_nothing() -> None:
    probes = [probe((1, 2), (0, 0, 2)), probe(())]
    assert expectations(probes, PolicyVersion(1)) == []


def test_a_divergence_names_the_first_differing_token_and_both_ids() -> None:
    (wanted,) = expectations([probe((1, 2, 3, 4, 5), (0, 0, 2), (1, 2, 5))], PolicyVersion(1))
    there = probe((3, 9, 9), (0, 0, 3)).completion
    found = diverging(wanted, there)
    assert found is not None
    assert (found["token"], found["expected_id"], found["actual_id"]) == (1, 4, 9)
    assert diverging(wanted, replace(there, token_ids=(3, 4, 5))) is None


def test_a_fresh_engine_that_stops_early_or_late_diverges_at_the_end() -> None:
    (wanted,) = expectations([probe((1, 2, 3), (1, 0, 3))], PolicyVersion(1))
    for tokens, ids in (((1, 2), (3, None)), ((1, 2, 3, 4), (None, 4))):
        found = diverging(wanted, replace(probe(()).completion, token_ids=tokens))
        assert found is not None
        assert (found["expected_id"], found["actual_id"]) == ids


FRESH = ValidationOptions(digest=False, canary=False, fresh=True)


async def run_fresh(
    options: ValidationOptions, wrong: int
) -> tuple[Parts, Verdict, dict[str, object], str]:
    """Four probes written by the staged weights, ``wrong`` of them changed at token 3."""
    parts = Parts(options)
    await parts.start(same_weights=True)
    path = await parts.trainer.save_checkpoint("v1")
    probes = []
    for i, prompt in enumerate(PROMPTS):
        request = GenerationRequest(f"p{i}", prompt, 6, temperature=0.0, kind=RequestKind.PROBE)
        done = await parts.engines[0].generate(request)
        tokens = list(done.token_ids)
        if i < wrong:
            tokens[3] ^= 1
        span = TokenSpan(PolicyVersion(1), 0, 6)
        probes.append(Rollout(request, replace(done, token_ids=tuple(tokens), spans=(span,))))
    result = await parts.validator.fresh(path, probes, PolicyVersion(1))
    return parts, result.verdict, dict(result.detail), explain(result)


async def test_probes_that_match_a_fresh_engine_pass_and_the_engine_is_released() -> None:
    parts, verdict, detail, _ = await run_fresh(FRESH, wrong=0)
    assert (verdict, detail["passed"], detail["pass_rate"]) == (Verdict.MATCH, 4, 1.0)
    (start,) = parts.world.calls("start", "fresh:fake://v1")
    assert start.ok
    assert len(parts.world.calls("aclose", "fresh:fake://v1")) == 1


async def test_a_fresh_mismatch_tells_the_first_diverging_token_with_both_ids() -> None:
    _, verdict, detail, line = await run_fresh(FRESH, wrong=1)
    assert (verdict, detail["passed"]) == (Verdict.MISMATCH, 3)
    differing = detail["diverging"]
    assert isinstance(differing, list)
    (found,) = differing
    assert found["token"] == 3
    assert found["expected_id"] == found["actual_id"] ^ 1
    assert f"diverges at new token 3: {found['expected_id']} in" in line
    assert f"{found['actual_id']} in" in line
    assert "'prompt 0'" in line


async def test_a_lower_required_pass_rate_lets_some_probes_differ() -> None:
    lenient = replace(FRESH, min_pass_rate=0.75)
    assert (await run_fresh(lenient, wrong=1))[1] is Verdict.MATCH
    assert (await run_fresh(lenient, wrong=2))[1] is Verdict.MISMATCH


async def test_no_probe_to_compare_is_inconclusive_and_starts_no_engine() -> None:
    parts = Parts(FRESH)
    await parts.start(same_weights=True)
    result = await parts.validator.fresh("fake://none", [probe(())], PolicyVersion(1))
    assert result.verdict is Verdict.INCONCLUSIVE
    assert parts.world.calls("start", "fresh:fake://none") == []


@pytest.mark.parametrize("method", ["start", "generate"])
async def test_a_fresh_engine_that_fails_is_released(method: str) -> None:
    parts = Parts(FRESH)
    await parts.start(same_weights=True)
    path = await parts.trainer.save_checkpoint("v1")
    parts.world.faults.fail(f"fresh:{path}", method)
    with pytest.raises(EngineError, match="injected"):
        await parts.validator.fresh(path, [probe((1, 2), (1, 0, 2))], PolicyVersion(1))
    assert parts.world.calls("aclose", f"fresh:{path}")
    assert parts.world.running() == []


def test_the_fresh_check_without_a_factory_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"ValidationOptions\(fresh=False"):
        Validator(FRESH, Fleet([FakeEngine("engine-0", FakeWorld())]))
