"""rollouts.jsonl and summary.json: nothing lost, nothing twice, as documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from orchestrator import events as ev
from orchestrator.errors import SyncError, ValidationFailed
from orchestrator.telemetry import report as report_module
from orchestrator.telemetry import schema
from orchestrator.telemetry.records import swap_record
from orchestrator.telemetry.report import RunRecorder
from orchestrator.telemetry.text import swap_line
from orchestrator.types import (
    CheckResult,
    FinishReason,
    Outcome,
    PolicyVersion,
    Rollout,
    Stall,
    State,
    Verdict,
)
from tests.unit.hand_made import AT, OP, changed, checks, probe, report, rollout, started, stats

DOCS = Path(__file__).parents[2] / "docs" / "output.md"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RunRecorder]:
    made = RunRecorder(tmp_path, "run-1", steps=2)
    yield made
    made.close()


def finished(r: Rollout) -> ev.RolloutFinished:
    return ev.RolloutFinished(AT, OP, r)


def consumed(r: Rollout, accepted: bool = True) -> ev.RolloutConsumed:
    return ev.RolloutConsumed(AT, OP, replace(r, staleness=1), accepted)


def trained(*batch: Rollout, **changes: Any) -> ev.TrainStepDone:
    return ev.TrainStepDone(AT, OP, stats(**changes), batch)


def lines(recorder: RunRecorder) -> list[schema.RolloutRecord]:
    text = (recorder.summary_path.parent / "rollouts.jsonl").read_text()
    return [schema.RolloutRecord.model_validate_json(line) for line in text.splitlines()]


def summary(recorder: RunRecorder) -> schema.Summary:
    return schema.Summary.model_validate_json(recorder.summary_path.read_text(), strict=False)


def test_a_trained_rollout_is_written_then_with_reward_and_staleness(
    recorder: RunRecorder,
) -> None:
    r = rollout()
    recorder(finished(r))
    recorder(consumed(r))
    assert lines(recorder) == []
    recorder(trained(replace(r, reward=0.75)))
    (line,) = lines(recorder)
    assert (line.id, line.status, line.reward, line.staleness) == ("r0.0", "trained", 0.75, 1)
    assert [s.model_dump() for s in line.spans] == [
        {"version": 0, "start": 0, "end": 2, "text": "text0"},
        {"version": 1, "start": 2, "end": 5, "text": "text1"},
    ]
    assert line.token_ids == [100, 101, 102, 103, 104]
    assert len(line.logprobs) == 5
    assert line.stalls[0].seconds == 0.25
    assert (line.prompt, line.prompt_token_ids) == ("prompt of r0.0", [7, 8])


def test_a_probe_is_written_when_it_ends(recorder: RunRecorder) -> None:
    recorder(finished(probe()))
    (line,) = lines(recorder)
    assert (line.kind, line.status, line.reward) == ("probe", "probe", None)


def test_a_discarded_rollout_is_written_as_such(recorder: RunRecorder) -> None:
    recorder(finished(rollout()))
    recorder(consumed(rollout(), accepted=False))
    (line,) = lines(recorder)
    assert (line.status, line.staleness) == ("discarded", 1)


def test_what_is_left_is_written_at_the_end_as_it_is(recorder: RunRecorder) -> None:
    partial = rollout("r9.9", spans=())
    partial = replace(
        partial, completion=replace(partial.completion, finish_reason=FinishReason.ABORT)
    )
    for r in (rollout("a"), rollout("b"), partial):
        recorder(finished(r))
    recorder(consumed(rollout("b")))
    recorder(ev.RunEnded(AT, OP, Outcome.INTERRUPTED, PolicyVersion(1)))
    status = {line.id: line.status for line in lines(recorder)}
    assert status == {"a": "unused", "b": "consumed", "r9.9": "unused"}
    recorder(finished(rollout("late")))
    recorder.finish(Outcome.INTERRUPTED)
    assert [line.id for line in lines(recorder)].count("late") == 1
    assert len(lines(recorder)) == 4


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_every_rollout_is_written_exactly_once(data: st.DataObject) -> None:
    import tempfile

    names = [f"r{n}" for n in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = RunRecorder(Path(folder), "run-1")
        seen: set[str] = set()
        moves = st.sampled_from(["finish", "consume", "discard", "train", "end"])
        for _ in range(data.draw(st.integers(0, 25))):
            name, move = data.draw(st.sampled_from(names)), data.draw(moves)
            r = rollout(name)
            if move == "end":
                recorder.finish(Outcome.COMPLETED)
                continue
            seen.add(name)
            if move == "finish":
                recorder(finished(r))
            elif move == "train":
                recorder(trained(replace(r, reward=1.0)))
            else:
                recorder(consumed(r, accepted=move == "consume"))
        recorder.finish(Outcome.COMPLETED)
        recorder.close()
        written = [line.id for line in lines(recorder)]
        assert sorted(written) == sorted(seen)


def test_consumed_rollouts_are_not_hoarded(
    recorder: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "HELD", 3)
    for n in range(10):
        recorder(finished(rollout(f"r{n}")))
        recorder(consumed(rollout(f"r{n}")))
    assert [line.id for line in lines(recorder)] == [f"r{n}" for n in range(7)]
    recorder(trained(replace(rollout("r0"), reward=1.0)))
    recorder.finish(Outcome.COMPLETED)
    assert sorted(line.id for line in lines(recorder)) == [f"r{n}" for n in range(10)]


def whole_run(recorder: RunRecorder) -> schema.Summary:
    recorder(started())
    recorder(changed(State.STARTING, State.GENERATING, 3.0))
    for step in (1, 2):
        batch = [rollout(f"r{step}.{n}") for n in range(2)]
        for r in batch:
            recorder(finished(r))
            recorder(consumed(r))
        recorder(trained(*batch, step=step, reward=step / 4))
        recorder(changed(State.GENERATING, State.PAUSING, 2.0))
        recorder(ev.SwapDone(AT, OP, report(step, Verdict.MATCH if step == 2 else Verdict.SKIPPED)))
        spans = ((step - 1, 0, 10), (step, 10, 110))
        for n in range(13):
            recorder(finished(probe(f"p{step}.{n}", spans=spans)))
    recorder(ev.RunEnded(AT, OP, Outcome.COMPLETED, PolicyVersion(2)))
    return summary(recorder)


def test_the_summary_of_a_whole_run(recorder: RunRecorder) -> None:
    s = whole_run(recorder)
    assert (s.schema_version, s.run_id, s.outcome, s.error) == (1, "run-1", "completed", None)
    assert (s.steps, s.steps_done, s.final_version) == (2, 2, 2)
    assert s.reward == [0.25, 0.5]
    assert s.hardware == "2 cores"
    assert s.packages == {"vllm": "0.32.0"}
    assert [(w.from_version, w.to_version) for w in s.swaps] == [(0, 1), (1, 2)]
    first = s.swaps[0]
    assert (first.backend, first.kv_policy, first.pause_mode) == ("gloo", "recompute", "keep")
    assert (first.bytes, first.requests_in_flight) == (13_600_000, 12)
    # Version 1 cut the 13 probes of step 1 and the four rollouts, which all span 0 and 1.
    assert (first.probes_cut, first.rollouts_cut) == (13, 4)
    assert s.swaps[1].probes_cut == 13
    assert first.seconds.model_dump() == {
        "quiesce": 0.005,
        "transfer": 0.14,
        "finalize": 0.01,
        "resume": 0.0015,
        "first_token": 0.04,
        "prefetch": None,
    }
    assert first.stall_s.model_dump() == {"count": 12, "p50": 0.18, "p95": 0.2, "max": 0.21}
    assert first.checks["digest"].detail["tensors"] == 4
    assert {k: c.verdict for k, c in s.swaps[1].checks.items()} == {
        "digest": "match",
        "canary": "match",
        "fresh": "match",
    }
    v = s.validation
    assert (v.prompts, v.passed, v.pass_rate, v.required, v.control) == (13, 13, 1.0, 1.0, "match")
    assert v.canary is not None
    assert (v.canary.tolerance, v.canary.max_abs_diff) == (1e-3, 1e-6)
    assert s.tokens == {"0": 4 * 2 + 130, "1": 4 * 3 + 1300 + 130, "2": 1300}
    assert s.rollouts.model_dump() == {
        "finished": 30,
        "trained": 4,
        "consumed": 0,
        "discarded": 0,
        "unused": 0,
        "probes": 26,
        "cut": 30,
    }
    assert s.state_seconds == {State.STARTING: 3.0, State.GENERATING: 4.0}
    assert s.stall_s.count == 30


def test_a_staged_swap_says_so_and_how_long_the_bytes_took(recorder: RunRecorder) -> None:
    done = report()
    staged = replace(
        done,
        update=replace(done.update, staged=True),
        seconds=replace(done.seconds, prefetch=0.25),
    )
    record = swap_record(staged, 0, 0)
    assert (record.backend, record.seconds.prefetch) == ("staged-gloo", 0.25)
    assert "over staged-gloo" in swap_line(staged, 1)
    assert "prefetch 250 ms before it" in swap_line(staged, 1)
    assert "prefetch" not in swap_line(done, 1)


def test_the_last_fresh_check_that_ran_counts(recorder: RunRecorder) -> None:
    recorder(ev.SwapDone(AT, OP, report(1)))
    recorder(ev.SwapDone(AT, OP, report(2, Verdict.SKIPPED)))
    assert recorder.finish(Outcome.COMPLETED).validation.prompts == 13


def test_without_checks_validation_is_null(recorder: RunRecorder) -> None:
    recorder(ev.SwapDone(AT, OP, replace(report(), checks=())))
    v = recorder.finish(Outcome.COMPLETED).validation
    assert set(v.model_dump().values()) == {None}


def test_a_failed_swap_is_there_with_the_checks_it_had(recorder: RunRecorder) -> None:
    error = ValidationFailed("fresh: 12 of 13")
    bad = CheckResult("fresh", Verdict.MISMATCH, {"prompts": 13, "passed": 12, "pass_rate": 0.9})
    error.report = replace(report(), checks=(*checks()[:2], bad))  # type: ignore[attr-defined]
    recorder(ev.SwapFailed(AT, OP, error, ("engine-0",)))
    recorder(ev.RunEnded(AT, OP, Outcome.FAILED, PolicyVersion(1), error))
    s = summary(recorder)
    assert s.swaps[0].checks["fresh"].verdict == "mismatch"
    assert s.validation.passed == 12
    assert s.failed_swaps[0].fenced == ["engine-0"]
    assert (s.error, s.error_type) == ("ValidationFailed: fresh: 12 of 13", "ValidationFailed")


def test_a_failed_sync_names_its_phase(recorder: RunRecorder) -> None:
    recorder(ev.SwapFailed(AT, OP, SyncError("PAUSING", "no answer")))
    (failed,) = recorder.finish(Outcome.FAILED).failed_swaps
    assert (failed.state, failed.sync_id) == ("PAUSING", "run-1-s1")


def test_a_later_finish_corrects_the_summary(recorder: RunRecorder) -> None:
    recorder(ev.RunEnded(AT, OP, Outcome.COMPLETED, PolicyVersion(0)))
    assert summary(recorder).outcome == "completed"
    recorder.finish(Outcome.FAILED, RuntimeError("teardown"))
    assert (summary(recorder).outcome, summary(recorder).error) == (
        "failed",
        "RuntimeError: teardown",
    )
    assert sorted(p.name for p in recorder.summary_path.parent.iterdir()) == [
        "rollouts.jsonl",
        "summary.json",
    ]


def test_numbers_that_are_none_are_null(recorder: RunRecorder) -> None:
    nan = float("nan")
    r = rollout()
    odd = replace(r.completion, logprobs=(nan, -1.0), stalls=(Stall("s", nan),))
    recorder(finished(replace(r, completion=odd)))
    recorder(trained(replace(r, completion=odd, reward=nan), loss=nan, grad_norm=float("inf")))
    infinite = CheckResult("canary", Verdict.MISMATCH, {"max_abs_diff": float("inf")})
    recorder(ev.SwapDone(AT, OP, replace(report(), checks=(infinite,))))
    recorder.finish(Outcome.FAILED)
    text = recorder.summary_path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    s = summary(recorder)
    assert s.training[0].loss is None
    assert s.validation.canary is not None and s.validation.canary.max_abs_diff is None
    (line,) = lines(recorder)
    assert line.logprobs == [None, -1.0]
    assert line.reward is None


def test_an_empty_run_has_a_summary(recorder: RunRecorder) -> None:
    recorder.finish(Outcome.FAILED, RuntimeError("no engine"))
    s = summary(recorder)
    assert (s.steps, s.steps_done, s.swaps, s.final_version) == (2, 0, [], None)
    assert s.stall_s.model_dump() == {"count": 0, "p50": None, "p95": None, "max": None}


def test_the_schema_refuses_what_it_does_not_know(recorder: RunRecorder) -> None:
    data = json.loads(whole_run(recorder).model_dump_json())
    schema.Summary.model_validate(data)
    for broken in (
        {**data, "extra": 1},
        {**data, "schema_version": 2},
        {**data, "outcome": "won"},
        {k: v for k, v in data.items() if k != "swaps"},
    ):
        with pytest.raises(ValidationError):
            schema.Summary.model_validate(broken)


def models(root: type[BaseModel]) -> set[type[BaseModel]]:
    found = {root}
    for field in root.model_fields.values():
        pending = [field.annotation]
        while pending:
            kind = pending.pop()
            pending += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
                found |= models(kind)
    return found


@pytest.mark.parametrize("root", [schema.Summary, schema.RolloutRecord])
def test_every_field_is_documented(root: type[BaseModel]) -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", DOCS.read_text()))
    missing = {f for model in models(root) for f in model.model_fields} - named
    assert not missing
