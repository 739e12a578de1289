"""``--inject``: what it takes, when it strikes, and whom it leaves alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import runner
from orchestrator.config import Settings
from orchestrator.errors import ConfigError, EngineDied, SyncError, TrainerDied
from orchestrator.events import EngineStarted, Event, FaultInjected, ReplicaDied, StateChanged
from orchestrator.flags import parse
from orchestrator.injection import PLACES, FaultKind, Injection, parse_injection
from orchestrator.injector import Injector, find_processes
from orchestrator.sources import load
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld
from orchestrator.types import EngineInfo, OpContext, State, TransferBackend
from tests.harness import DIGEST, SWAP, Rig, drive, make_rig, now
from tests.unit.fake_run import FakeAssembly, FakePrepared

TARGETS = ("trainer", "engine.*", "engine.0", "engine.12", "engine.3.core", "engine.*.actor")


@st.composite
def injections(draw: st.DrawFn) -> Injection:
    kind = draw(st.sampled_from(FaultKind))
    seconds = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)
    return Injection(
        draw(st.sampled_from(TARGETS)),
        kind,
        draw(st.sampled_from(PLACES)),
        step=draw(st.none() | st.integers(1, 10**6)),
        seconds=draw(seconds) if kind is FaultKind.SLOW else None,
        times=draw(st.integers(1, 99)),
    )


@given(injections())
def test_what_is_written_reads_back(injection: Injection) -> None:
    assert parse_injection(str(injection)) == injection


@given(st.text(alphabet="engitraslowcrhSYNCING.*@:=0123456789 ", max_size=60))
def test_any_text_is_an_injection_or_a_mistake(text: str) -> None:
    try:
        found = parse_injection(text)
    except ConfigError:
        return
    assert parse_injection(str(found)) == found


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("engine.0", "write for example engine.0:crash@SYNCING"),
        ("gpu.0:crash@SYNCING", "unknown target 'gpu.0': known are engine.N, engine.*, trainer"),
        ("engine.-1:crash@SYNCING", "unknown target"),
        ("engine.0:melt@SYNCING", "unknown kind 'melt': known are crash, hang, slow"),
        ("engine.0:crash@STARTING", "unknown state 'STARTING': known are GENERATING, STAGING"),
        ("engine.0:crash@SYNCING:at=3", "unknown option 'at': known are step, seconds, times"),
        ("engine.0:crash@SYNCING:step=0", "step=0: must be a whole number from 1"),
        ("engine.0:crash@SYNCING:times=x", "times=x: must be a whole number from 1"),
        ("engine.0:crash@SYNCING:step=1:step=2", "step is given twice"),
        ("engine.0:crash@SYNCING:seconds=2", "belongs to slow"),
        ("engine.0:slow@SYNCING:seconds=nan", "must be a number above 0"),
        ("engine.5:crash@SYNCING", "there are engine.0, engine.1, engine.* and trainer"),
        ("engine.0:crash@SYNCING:step=9", "the steps of this run are 1 to 3"),
    ],
)
def test_a_mistake_says_what_is_known(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(parse(["--inject", text, "--steps", "3", "--engines", "2"]))
    assert part in str(caught.value) and f"--inject {text}" in str(caught.value)
    assert caught.value.exit_code == 2


def test_flags_variable_and_file_say_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both = ["engine.0:crash@SYNCING", "trainer:slow@PAUSING:seconds=0.5"]
    s = load(parse(["--inject", both[0], "--inject", both[1]]))
    assert s.inject == tuple(map(parse_injection, both))
    conf = tmp_path / "conf.yaml"
    conf.write_text(yaml.safe_dump({"inject": both}))
    assert load({}, conf).inject == s.inject
    assert yaml.safe_load(s.to_yaml())["inject"] == both
    monkeypatch.setenv("MIDFLIGHT_INJECT", ",".join(both))
    assert load({}).inject == s.inject
    monkeypatch.delenv("MIDFLIGHT_INJECT")
    assert load({}).inject == ()


def test_staging_needs_bytes_that_travel_before_the_pause() -> None:
    s = Settings(inject="engine.0:slow@STAGING")
    with pytest.raises(ConfigError, match="over gloo no bytes travel before the pause"):
        runner.check_injections(s, FakePrepared())
    runner.check_injections(s, FakePrepared(staged=True))
    runner.check_injections(s, FakePrepared(backend=TransferBackend.IPC))


# the observer


@dataclass
class FakeProcess:
    pid: int
    kills: Callable[[], None] = lambda: None
    got: list[tuple[str, float]] = field(default_factory=list)

    def kill(self) -> None:
        self.got.append(("kill", now()))
        self.kills()

    def suspend(self) -> None:
        self.got.append(("stop", now()))

    def resume(self) -> None:
        self.got.append(("cont", now()))

    @property
    def signals(self) -> list[str]:
        return [name for name, _ in self.got]


class Machine:
    """The processes of a machine, by pid."""

    def __init__(self) -> None:
        self.processes: dict[int, FakeProcess] = {}

    def add(self, pid: int, kills: Callable[[], None] = lambda: None) -> FakeProcess:
        self.processes[pid] = FakeProcess(pid, kills)
        return self.processes[pid]

    def find(self, pids: Sequence[int], node_ip: str) -> list[FakeProcess]:
        return [self.processes[pid] for pid in pids if pid in self.processes]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def up(name: str, *pids: int) -> EngineStarted:
    return EngineStarted(0.0, OpContext(), EngineInfo(name, 1, "float32", 8, 8, pids))


def entered(state: State, step: int, trigger: str = "sync") -> StateChanged:
    return StateChanged(0.0, OpContext(step=step), State.GENERATING, state, trigger)


def injector(machine: Machine, told: list[Event], *texts: str) -> Injector:
    return Injector([parse_injection(t) for t in texts], told.append, find=machine.find)


async def test_a_crash_strikes_once_at_its_step_and_says_so(machine: Machine) -> None:
    told: list[Event] = []
    inject = injector(machine, told, "engine.1:crash@SYNCING:step=2")
    processes = {pid: machine.add(pid) for pid in (10, 11, 20, 21)}
    inject(up("engine-0", 10, 11))
    inject(up("engine-1", 20, 21))
    for step in (1, 2, 2, 3):
        inject(entered(State.PAUSING, step))
        inject(entered(State.SYNCING, step))
    assert [len(p.got) for p in processes.values()] == [0, 0, 1, 1]
    (event,) = told
    assert isinstance(event, FaultInjected)
    assert (event.actor, event.kind, event.place, event.step) == ("engine-1", "crash", "SYNCING", 2)
    assert event.pids == (20, 21)
    assert inject.never_struck() == []


async def test_a_replacement_is_struck_too(machine: Machine) -> None:
    told: list[Event] = []
    inject = injector(machine, told, "engine.1:crash@SYNCING:times=2")
    first, second = machine.add(20), machine.add(30)
    inject(up("engine-1", 20))
    inject(entered(State.SYNCING, 1))
    inject(ReplicaDied(0.0, OpContext(), "engine-1", "SIGKILL"))
    inject(entered(State.SYNCING, 1))  # nobody is there
    assert inject.never_struck() == ["injection engine.1:crash@SYNCING:times=2 struck 1 of 2 times"]
    inject(up("engine-1.r1", 30))
    inject(entered(State.SYNCING, 1))
    inject(entered(State.SYNCING, 2))
    assert (first.signals, second.signals) == (["kill"], ["kill"])
    assert [cast(FaultInjected, e).actor for e in told] == ["engine-1", "engine-1.r1"]
    assert inject.never_struck() == []


@pytest.mark.parametrize(
    ("target", "struck"),
    [
        ("engine.*", [10, 11, 12, 20]),
        ("engine.0.core", [11, 12]),
        ("engine.0.actor", [10]),
        ("engine.1", [20]),
    ],
)
async def test_a_target_is_its_processes(machine: Machine, target: str, struck: list[int]) -> None:
    inject = injector(machine, [], f"{target}:hang@PAUSING")
    for pid in (10, 11, 12, 20, 30):
        machine.add(pid)
    inject(up("engine-0", 10, 11, 12))
    inject(up("engine-1", 20))
    inject(up("fresh", 30))
    inject(entered(State.PAUSING, 1))
    assert [p.pid for p in machine.processes.values() if p.got] == struck
    inject.close()
    assert all(machine.processes[pid].signals == ["stop", "cont"] for pid in struck)


async def test_a_slow_process_stands_still_for_its_seconds(machine: Machine) -> None:
    inject = injector(machine, [], "engine.0:slow@RESUMING:seconds=0.5:times=2")
    process = machine.add(10)
    inject(up("engine-0", 10))
    inject(entered(State.RESUMING, 1))
    await asyncio.sleep(2)
    inject(entered(State.RESUMING, 2))
    inject.close()  # the run ends before it may go on
    inject.close()
    assert process.got == [("stop", 0.0), ("cont", 0.5), ("stop", 2.0), ("cont", 2.0)]


async def test_generating_of_a_step_begins_when_the_step_before_was_proved(
    machine: Machine,
) -> None:
    inject = injector(machine, [], "engine.0:hang@GENERATING:step=2")
    process = machine.add(10)
    inject(up("engine-0", 10))
    inject(replace(entered(State.GENERATING, 1, "start"), op=OpContext()))
    inject(entered(State.GENERATING, 1, "recover"))
    assert process.got == []
    inject(entered(State.GENERATING, 1, "verify"))
    assert process.signals == ["stop"]
    inject.close()


async def test_what_never_struck_is_told(machine: Machine) -> None:
    told: list[Event] = []
    inject = injector(machine, told, "engine.0:crash@SYNCING", "engine.0:crash@PAUSING:step=7")
    inject(up("engine-0", 10))  # on another machine
    inject(entered(State.SYNCING, 1))
    assert told == []
    assert inject.never_struck() == [
        "injection engine.0:crash@SYNCING never struck: its target had no process on this machine",
        "injection engine.0:crash@PAUSING:step=7 never struck: the run did not come to PAUSING of "
        "step 7",
    ]


# over fakes


def with_faults(
    world: FakeWorld, machine: Machine, *texts: str, **options: Any
) -> tuple[Rig, Injector, list[Event]]:
    """Two engines and a trainer whose processes' death is theirs."""
    told: list[Event] = []
    inject = injector(machine, told, *texts)
    rig = make_rig(world, 2, validation=DIGEST, observers=[inject], **options)
    actors: list[FakeEngine | FakeTrainer] = [*rig.engines, rig.trainer]
    for n, actor in enumerate(actors):
        actor.pids = (100 + n,)
        machine.add(100 + n, lambda actor=actor: actor.kill("SIGKILL"))  # type: ignore[misc]
    return rig, inject, told


@pytest.mark.parametrize("place", [p for p in PLACES if p != "STAGING"])
@pytest.mark.parametrize("target", ["engine.1", "trainer"])
async def test_a_crash_in_any_state_ends_a_run(
    world: FakeWorld, machine: Machine, target: str, place: str
) -> None:
    rig, inject, told = with_faults(world, machine, f"{target}:crash@{place}:step=2")
    result = await drive(rig, 3)
    assert isinstance(result, EngineDied | TrainerDied | SyncError), result
    (event,) = told
    assert isinstance(event, FaultInjected)
    assert event.actor == ("trainer" if target == "trainer" else "engine-1")
    assert (event.place, event.step, event.op.state) == (place, 2, place)
    assert rig.orchestrator.version in (1, 2)
    assert inject.never_struck() == []
    rig.assert_invariants()


async def test_staging_is_before_the_pause(world: FakeWorld, machine: Machine) -> None:
    staged = replace(SWAP, staged=True)
    rig, _, told = with_faults(world, machine, "engine.0:crash@STAGING:step=1", swap=staged)
    result = await drive(rig, 2)
    assert isinstance(result, SyncError | EngineDied)
    (event,) = told
    assert (event.op.state, cast(FaultInjected, event).place) == ("GENERATING", "STAGING")
    assert not rig.world.calls("pause")
    rig.assert_invariants()


async def test_a_run_warns_of_what_never_struck(tmp_path: Path, world: FakeWorld) -> None:
    assembly = FakeAssembly(world)
    code = await runner.run(
        Settings(steps=1, inject="engine.0:crash@VALIDATING,trainer:hang@PAUSING:step=1"),
        FakePrepared(),
        assembly.assemble,
        run_dir=tmp_path,
        run_id="run-1",
    )
    assert code == 0
    text = (tmp_path / "events.jsonl").read_text()
    assert text.count("never struck: its target had no process on this machine") == 2


# real processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.real_time
def test_only_running_processes_of_this_machine_are_found(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert [p.pid for p in find_processes([sleeper.pid], "127.0.0.1")] == [sleeper.pid]
    assert find_processes([sleeper.pid], "192.0.2.1") == ()
    (process,) = find_processes([sleeper.pid], "127.0.0.1")
    process.suspend()
    process.resume()
    process.kill()
    assert sleeper.wait() == -9
    assert find_processes([sleeper.pid], "127.0.0.1") == []


@pytest.mark.real_time
def test_a_resource_tracker_is_left_to_free_what_is_shared() -> None:
    words = [
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        "multiprocessing.resource_tracker",
    ]
    with subprocess.Popen(words) as tracker:
        try:
            assert find_processes([tracker.pid], "127.0.0.1") == []
        finally:
            tracker.kill()
