"""The simulator: its grammar, its calibration, its decoder, its runs and its command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.errors import ConfigError
from orchestrator.simulate import (
    CostModel,
    FaultKind,
    FaultRule,
    Scenario,
    SimulationResult,
    parse_faults,
    simulate,
)
from orchestrator.simulate.decoder import CountingDecoder
from orchestrator.simulate.faults import plan
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld
from orchestrator.types import (
    Completion,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    Prompt,
    TransferBackend,
    WeightUpdate,
)

BASELINES = Path(__file__).parents[2] / "benchmarks" / "baselines"
SMALL = Scenario(engines=6, steps=4, max_tokens=32)


# -- the grammar


def test_a_spec_is_a_list_of_rules() -> None:
    rules = parse_faults(" crash=3, hang=0.5%,flip=2 ,slow=5x8,trainer-crash=1")
    assert rules == (
        FaultRule(FaultKind.CRASH, count=3),
        FaultRule(FaultKind.HANG, rate=0.005),
        FaultRule(FaultKind.FLIP, count=2),
        FaultRule(FaultKind.SLOW, count=5, factor=8.0),
        FaultRule(FaultKind.TRAINER_CRASH, count=1),
    )
    assert parse_faults(",".join(map(str, rules))) == rules
    assert parse_faults("") == parse_faults("  ") == ()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("crash", "'crash' is not KIND=COUNT"),
        ("crash=", "is not KIND=COUNT"),
        ("crash=-1", "is not KIND=COUNT"),
        ("crash=1.5", "is not KIND=COUNT"),
        ("crash=1,,flip=2", "'' is not KIND=COUNT"),
        ("quake=1", "'quake' is none of crash, hang, flip, slow, trainer-crash"),
        ("crash=3x2", "only slow has a factor"),
        ("slow=3x0.5", "at least 1 times"),
        ("hang=101%", "at most 100%"),
    ],
)
def test_a_wrong_spec_is_named(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        parse_faults(spec)


def test_a_plan_has_exactly_the_count_and_spreads_it() -> None:
    rules = parse_faults("crash=40,slow=7x3,trainer-crash=2")
    steps = plan(rules, engines=8, steps=10, seed=1, prefetched=True)
    assert Counter(f.kind for step in steps for f in step) == {
        FaultKind.CRASH: 40,
        FaultKind.SLOW: 7,
        FaultKind.TRAINER_CRASH: 2,
    }
    assert [sum(f.kind is FaultKind.CRASH for f in step) for step in steps] == [4] * 10
    for step in steps:
        slots = [f.slot for f in step if f.kind is FaultKind.CRASH]
        assert len(set(slots)) == len(slots)
    assert steps == plan(rules, engines=8, steps=10, seed=1, prefetched=True)
    assert steps != plan(rules, engines=8, steps=10, seed=2, prefetched=True)


def test_a_rate_is_of_engine_steps() -> None:
    rules = parse_faults("flip=10%")
    count = sum(map(len, plan(rules, engines=100, steps=50, seed=0, prefetched=False)))
    assert 430 < count < 570  # 500 expected; three deviations are 64
    assert not any(plan(parse_faults("crash=0%"), 100, 50, 0, prefetched=True))


# -- the costs


def test_the_defaults_are_those_of_the_baseline_they_name() -> None:
    assert CostModel.from_json(BASELINES / "nvidia-h200-x2.json") == CostModel()


def test_every_baseline_calibrates() -> None:
    cpu = CostModel.from_json(BASELINES / "cpu-2-cores.json")
    assert (cpu.backend, cpu.staged, cpu.nbytes) == (TransferBackend.GLOO, True, 5_380_096)
    found = json.loads((BASELINES / "cpu-2-cores.json").read_text())
    staged = next(m for m in found["methods"] if m["name"] == "staged-gloo")
    assert cpu.wire_s == pytest.approx(staged["phases"]["prefetch"]["p50"])
    assert cpu.commit_s == pytest.approx(staged["phases"]["transfer"]["p50"])
    speed = found["throughput"][1]["tokens_per_s"]["without"]
    assert cpu.decode_step_s == pytest.approx(13 / speed)
    gpu = CostModel.from_json(BASELINES / "nvidia-h200.json")
    assert gpu.backend is TransferBackend.IPC
    assert 0.002 < gpu.decode_step_s < 0.004


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("{", "Expecting"),
        ("[]", "methods"),
        ('{"methods": [{"note": "the naive way"}]}', "methods: none by this project"),
        ('{"methods": [{"note": "this project", "backend": "pigeon"}]}', "'pigeon'"),
        ('{"methods": [{"note": "this project", "backend": "gloo"}]}', "bytes"),
        (
            '{"bytes": 8, "methods": [{"note": "this project", "backend": "gloo", "phases": {}}]}',
            "methods.gloo..phases.transfer",
        ),
    ],
)
def test_a_file_that_is_no_result_says_what_it_lacks(tmp_path: Path, text: str, lacks: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=lacks) as caught:
        CostModel.from_json(file)
    assert str(file) in str(caught.value)


def test_a_cost_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode_step_s is 0"):
        CostModel(decode_step_s=0)
    with pytest.raises(ConfigError, match="train_s is -1"):
        CostModel(train_s=-1)


# -- the decoder that counts


class Counting(FakeEngine):
    decoder_type = CountingDecoder


def seen(done: Completion) -> tuple[object, ...]:
    stalls = [(s.sync_id, pytest.approx(s.seconds)) for s in done.stalls]
    return done.request_id, len(done.token_ids), done.spans, done.finish_reason, stalls


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("pause_at", [0.005, 0.052, 0.118])
async def test_counted_tokens_come_when_computed_ones_do(mode: PauseMode, pause_at: float) -> None:
    """The same swap over both decoders: same tokens, spans, stalls and times."""

    async def life(kind: type[FakeEngine]) -> list[object]:
        loop = asyncio.get_running_loop()
        world, began = FakeWorld(), loop.time()
        engine, trainer = kind("engine-0", world), FakeTrainer(world)
        await asyncio.gather(engine.start(), trainer.start())
        spec = await trainer.listen(TransferBackend.GLOO, 2, 5.0)
        await asyncio.gather(engine.open_channel(spec, 1), trainer.open_channel(spec))
        update = WeightUpdate(
            "s1", PolicyVersion(0), PolicyVersion(1), 1, TransferBackend.GLOO, mode, KVPolicy.KEEP
        )
        told: list[object] = []

        async def request(name: str, at: float, tokens: int) -> None:
            await asyncio.sleep(at)
            done = await engine.generate(GenerationRequest(name, Prompt((1, 2)), tokens))
            told.append((*seen(done), round(loop.time() - began, 6)))

        async def threshold(at: float, tokens: int) -> None:
            await asyncio.sleep(at)
            live = await engine.wait_for_tokens(tokens)
            told.append(("threshold", live, round(loop.time() - began, 6)))

        async def swap() -> None:
            await asyncio.sleep(pause_at)
            ack = await engine.pause(mode, KVPolicy.KEEP)
            told.append((ack, round(loop.time() - began, 6)))
            await trainer.stage(update.version)
            await engine.start_update(update)
            await asyncio.gather(engine.receive_update(update), trainer.send(update))
            await engine.finish_update(update)
            await engine.resume()
            first = await engine.wait_first_tokens(update)
            told.append((round(first.seconds or 0, 6), sorted(round(s, 6) for s in first.stalls)))

        await asyncio.gather(
            request("a", 0.001, 9),
            request("b", 0.0335, 20),
            request("c", 0.0535, 4),
            request("late", 0.1225, 3),
            threshold(0.002, 5),
            threshold(0.0405, 1),
            swap(),
        )
        await asyncio.gather(engine.aclose(), trainer.aclose())
        assert world.violations == []
        return sorted(told, key=str)

    assert await life(Counting) == await life(FakeEngine)


# -- runs


def assert_whole(result: SimulationResult) -> None:
    assert result.error is None
    assert result.broken == ()
    assert result.ok
    assert result.requests_lost == 0
    assert result.tokens_lost == 0
    assert result.swaps == result.steps == result.scenario["steps"]
    assert result.requests >= result.steps * result.scenario["engines"] * 4


@pytest.mark.parametrize("engines", [1, 2, 64])
def test_a_run_without_faults_loses_nothing(engines: int) -> None:
    result = simulate(replace(SMALL, engines=engines))
    assert_whole(result)
    assert result.pause_s.count == result.commit_s.count == 4
    assert result.waiting_s.max == pytest.approx(0, abs=1e-6), "the controller waits in turn"
    assert result.overhead_cpu_s.p50 is not None and result.overhead_cpu_s.p50 > 0


def test_the_seed_alone_decides_the_trace() -> None:
    scenario = replace(SMALL, faults=parse_faults("slow=5x4"))
    first, second = simulate(scenario), simulate(scenario)
    assert first.trace == second.trace
    assert (first.pause_s, first.seconds) == (second.pause_s, second.seconds)
    assert simulate(replace(scenario, seed=1)).trace != first.trace
    assert simulate(SMALL).trace != first.trace


@pytest.mark.parametrize("faults", ["slow=3", "crash=1,hang=1,flip=1,slow=2"])
def test_another_process_has_the_same_trace(faults: str) -> None:
    scenario = replace(SMALL, faults=parse_faults(faults))
    code = (
        "from orchestrator.simulate import *; "
        f"print(simulate(Scenario(engines=6, steps=4, max_tokens=32, "
        f"faults=parse_faults({faults!r}))).trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert traces == {simulate(scenario).trace}


def test_every_way_of_a_baseline_runs() -> None:
    for name in ("cpu-2-cores", "nvidia-h200"):
        costs = CostModel.from_json(BASELINES / f"{name}.json")
        assert_whole(simulate(replace(SMALL, costs=costs)))
    assert_whole(simulate(replace(SMALL, costs=CostModel(staged=False))))


def test_slow_calls_make_swaps_slow_and_nothing_else() -> None:
    plain = simulate(SMALL)
    slow = simulate(replace(SMALL, faults=parse_faults("slow=30x20")))
    assert_whole(slow)
    assert slow.faults_struck == {"slow": 30}
    assert slow.pause_s.max and plain.pause_s.max
    assert slow.seconds > plain.seconds


def test_rollouts_are_never_staler_than_allowed() -> None:
    assert_whole(simulate(replace(SMALL, max_staleness=0)))


@pytest.mark.parametrize("kind", ["crash", "hang", "flip", "trainer-crash"])
def test_a_fault_strikes_and_breaks_no_invariant(kind: str) -> None:
    result = simulate(replace(SMALL, faults=parse_faults(f"{kind}=1")))
    assert result.faults == result.faults_struck == {kind: 1}
    assert result.broken == ()
    if result.error is not None:  # a controller without recovery ends the run with the cause
        assert not result.ok


def test_many_replicas_under_faults_end_clean() -> None:
    faults = parse_faults("crash=8,hang=4,flip=4,slow=16,trainer-crash=1")
    result = simulate(Scenario(engines=64, steps=5, faults=faults))
    assert result.broken == ()
    assert sum(result.faults.values()) == 33
    assert result.faults_struck


# -- the command


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--engines", "3", "--steps", "2", "--max-tokens", "16", "--json", str(out)]
    assert cli.main(["simulate", *flags, "--costs", str(BASELINES / "cpu-2-cores.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["trace"] in printed
    assert found["ok"] and found["swaps"] == 2
    assert found["scenario"]["costs"]["backend"] == "gloo"
    assert "completed: no request lost" in printed


def test_a_sweep_prints_a_line_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--steps", "2", "--sweep", "1,2", "--max-tokens", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1", "| 2"]
    assert len({line.count("|") for line in lines}) == 1


def test_a_run_that_failed_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = replace(simulate(replace(SMALL, steps=1)), requests_lost=2)
    monkeypatch.setattr("orchestrator.simulate.cli.simulate", lambda scenario: lost)
    assert cli.main(["simulate"]) == 1
    assert "2 requests lost" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--faults", "quake=1"],
        ["--engines", "0"],
        ["--engines", "many"],
        ["--steps", "1.5"],
        ["--sweep", "1,"],
        ["--max-staleness", "-1"],
        ["--train-seconds", "nan"],
        ["--costs", "/nowhere/at/all.json"],
        ["--json", "/nowhere/at/all.json"],
        ["--engine", "3"],
        ["word"],
    ],
)
def test_a_mistake_is_one_line_and_exits_with_2(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("midflight: error: ") and err.count("\n") == 1
    assert flags[-1] in err or flags[0] in err
