"""The parts of the engine actor that need neither Ray nor vLLM."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray.exceptions as rex
from hypothesis import given
from hypothesis import strategies as st

from actors.home import HomeLoop
from actors.processes import ProcessId, kill, shared_memory, tree
from actors.remote import RemoteActor
from actors.reporting import ActorReporter
from actors.texts import CONTEXT_TOKENS, cut_text
from actors.transfer.wire_errors import from_wire, wire_errors
from orchestrator.errors import ChannelError, EngineDied, EngineError, MidflightError, TransferError
from orchestrator.types import OpContext


def test_pieces_joined_are_the_text_and_no_character_is_cut() -> None:
    data = "añb→c".encode()

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    for cut in range(len(data) + 1):
        text, pieces = cut_text(decode, [65], list(data), [cut, len(data)])
        assert text == "añb→c"
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


@given(
    text=st.text(max_size=60),
    prompt=st.binary(max_size=9),
    cuts=st.lists(st.integers(0, 240), max_size=30),
    odd=st.booleans(),
)
def test_pieces_are_those_of_decoding_every_prefix_anew(
    text: str, prompt: bytes, cuts: list[int], odd: bool
) -> None:
    """``odd``: a tokenizer that drops a leading space, as sentencepiece does."""
    data = list(text.encode())
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})

    def decode(ids: list[int]) -> str:
        decoded = bytes(ids).decode(errors="replace")
        return decoded.removeprefix(" ") if odd else decoded

    context = list(prompt[-CONTEXT_TOKENS:])
    whole = decode(context + data)

    def shared(prefix: str) -> int:
        pairs = zip(prefix.rstrip("\ufffd"), whole, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    start = shared(decode(context))
    lengths = [start]
    for end in ends:
        prefix = decode(context + data[:end])
        lengths.append(len(whole) if end == len(data) else max(lengths[-1], shared(prefix)))
    found, pieces = cut_text(decode, list(prompt), data, ends)
    assert found == whole[start:]
    assert pieces == tuple(whole[a:b] for a, b in itertools.pairwise(lengths))


def test_a_request_of_many_swaps_is_cut_in_one_pass() -> None:
    decoded = 0

    def decode(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return bytes(ids).decode()

    data = list(b"abcdefgh" * 100)
    text, pieces = cut_text(decode, [65], data, list(range(10, 801, 10)))
    assert ("".join(pieces), {len(piece) for piece in pieces}) == (text, {10})
    assert decoded < 4 * len(data)


def test_transfer_errors_cross_an_rpc_that_only_carries_text() -> None:
    @wire_errors
    def fail(error: Exception) -> None:
        raise error

    for error in (TransferError("two words"), ChannelError("line\nline")):
        with pytest.raises(Exception, match="midflight") as caught:
            fail(error)
        back = from_wire(f"Call to x failed: {caught.value}, see above")
        assert type(back) is type(error)
        assert str(back) == str(error)
    with pytest.raises(ValueError, match="other"):
        fail(ValueError("other"))
    assert from_wire("anything else") is None


async def test_records_carry_their_operation_and_wake_the_reader() -> None:
    reporter = ActorReporter("engine-0", limit=3)
    reading = asyncio.ensure_future(reporter.next_events())
    await asyncio.sleep(0)
    assert not reading.done()
    with reporter.op(OpContext("run", "s1", 2, 3, "SYNCING")):
        reporter.info("moved", bytes=5)
    (record,) = await reading
    wanted = {"run_id": "run", "sync_id": "s1", "step": 2, "version": 3, "state": "SYNCING"}
    assert wanted.items() <= record.items()
    assert (record["actor"], record["event"], record["bytes"]) == ("engine-0", "moved", 5)
    for number in range(5):
        reporter.info(f"n{number}")
    events = [r["event"] for r in await reporter.next_events()]
    assert events == ["records dropped", "n2", "n3", "n4"]


@pytest.mark.real_time
async def test_cancelling_a_call_cancels_it_at_home() -> None:
    home = HomeLoop()
    started, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def work() -> None:
        loop.call_soon_threadsafe(started.set)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            loop.call_soon_threadsafe(ended.set)

    async with asyncio.timeout(5):
        task = asyncio.ensure_future(home.run(work()))
        await started.wait()
        task.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
    home.stop()


def test_a_recycled_pid_is_never_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    try:
        mine = ProcessId.of(child.pid)
        assert mine is not None
        assert kill([ProcessId(child.pid, mine.started - 60)]) == ()
        assert child.poll() is None
        assert ProcessId.of(child.pid) in tree(os.getpid())
        assert kill([mine]) == ()
        assert child.wait(5) == -9
    finally:
        child.kill()
        child.wait()


class _Raises:
    """A Ray method whose reference raises when awaited."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def options(self, **_: object) -> _Raises:
        return self

    async def remote(self, *_: object) -> None:
        raise self._error


class _Handle:
    def __init__(self, error: Exception) -> None:
        self.method = _Raises(error)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (rex.ActorDiedError(), EngineDied),
        (rex.ActorUnavailableError("x", b"0" * 16), EngineDied),
        (rex.RayTaskError("f", "Traceback\nValueError: odd", ValueError("odd")), EngineError),
        (rex.RayTaskError("f", "Traceback", ChannelError("words")), ChannelError),
        (rex.GetTimeoutError("late"), EngineError),
        (rex.ObjectStoreFullError("full"), EngineError),
    ],
)
async def test_no_ray_error_leaves_the_adapter(
    raised: Exception, expected: type[MidflightError]
) -> None:
    remote = RemoteActor("e", lambda t: EngineDied("e", t), lambda t: EngineError("e", t))
    remote._handle = _Handle(raised)
    with pytest.raises(MidflightError) as caught:
        await remote.call("control", "method")
    assert type(caught.value) is expected
    assert caught.value.__cause__ is None
    if isinstance(raised, rex.RayTaskError):
        assert "words" in str(caught.value) or "odd" in str(caught.value)


async def test_an_actor_that_was_not_started_says_so() -> None:
    remote = RemoteActor("e", lambda t: EngineDied("e", t), lambda t: EngineError("e", t))
    with pytest.raises(EngineError, match="not started"):
        await remote.wait_dead()
    await remote.aclose()
    await remote.aclose()


def test_a_semaphore_is_found_though_its_maker_mapped_it_under_another_name() -> None:
    lock: Any = multiprocessing.get_context("spawn").Lock()
    name = f"/dev/shm/sem.{lock._semlock.name[1:]}"
    me = ProcessId.of(os.getpid())
    assert me is not None and Path(name).exists()
    assert name in shared_memory([me])


def test_what_survives_a_killed_actor_ends_and_takes_its_files_along(tmp_path: Path) -> None:
    """Nobody closes here: the process that watches its actor does all of it."""
    script = tmp_path / "actor.py"
    script.write_text(
        "import multiprocessing, os, threading\n"
        "from actors.processes import ACTOR_ENV, die_with_actor\n"
        "from actors.scratch import SCRATCH_ENV, make_scratch\n"
        "def core(lock):\n"
        "    die_with_actor()\n"
        "    print(os.getpid(), os.environ[SCRATCH_ENV], lock._semlock.name[1:], flush=True)\n"
        "    threading.Event().wait(60)\n"
        "if __name__ == '__main__':\n"
        "    os.environ.update({**make_scratch(), ACTOR_ENV: str(os.getpid())})\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    lock = spawn.Lock()\n"
        "    spawn.Process(target=core, args=(lock,)).start()\n"
        "    threading.Event().wait(60)\n"
    )
    # A short temporary folder, as the longest path of a socket asks for.
    environment = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": os.pathsep.join(sys.path)}
    actor = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert actor.stdout is not None
        pid, folder, name = actor.stdout.readline().split()
        core = psutil.Process(int(pid))
        semaphore = Path(f"/dev/shm/sem.{name}")
        assert Path(folder).is_dir() and semaphore.exists()
    finally:
        actor.kill()
        actor.wait()
    _, alive = psutil.wait_procs([core], timeout=10)
    assert not alive
    assert not Path(folder).exists() and not semaphore.exists()
