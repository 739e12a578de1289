"""Several nodes: Ray's own test cluster of three, in a process of its own (cases 31 and 37)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors import nodes
from actors.cluster import look
from orchestrator.errors import ConfigError

from .command import ROOT, command

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
DEADLINE_S = 60.0
NODES = 3

ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
size = {"num_cpus": 1, "object_store_memory": 80 * 2**20, **json.loads(sys.argv[2])}
cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
for _ in range(int(sys.argv[1]) - 1):
    cluster.add_node(**size)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
ASK = """
import json, sys, ray
from ray._private.state import actors
from ray.util import list_named_actors, placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({
    "nodes": ray.nodes(),
    "actors": [a["ActorID"] for a in actors().values() if a["State"] != "DEAD"],
    "named": list_named_actors(all_namespaces=True),
    "groups": [g for g in placement_group_table().values() if g["state"] != "REMOVED"],
    "cpus": ray.cluster_resources()["CPU"],
    "free": ray.available_resources().get("CPU", 0),
}))
"""
DRIVER = """
import asyncio, json, os, sys
from pathlib import Path
from actors import assembly, nodes
from actors.placement import Seating
from actors.remote import RemoteActor
from orchestrator.errors import EngineDied, EngineError

class Tenant:
    async def where(self):
        names = ("PYTHONPATH", "NCCL_PROTO")
        return os.getpid(), nodes.ray_node(), nodes.node_address(), [os.environ[n] for n in names]
    async def next_events(self):
        return await asyncio.get_running_loop().create_future()
    async def watch(self):
        return await asyncio.get_running_loop().create_future()

async def main():
    async with assembly.connected(sys.argv[1], Path(sys.argv[2])):
        seating = Seating({"trainer": 0, "engine": 0, "fresh": 0}, spread=True)
        seats = [seating.trainer(), seating.engine(), seating.engine(), seating.fresh()]
        found = []
        for i, seat in enumerate(seats):
            one = RemoteActor(f"t{i}", lambda t: EngineDied("t", t), lambda t: EngineError("t", t))
            await one.launch(Tenant, (), {}, {"watch": 8}, {}, seat)
            found.append((one, await one.call("watch", "where")))
        print(json.dumps([where for _, where in found]), flush=True)
        await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""
LOCAL = """
import asyncio, sys
from pathlib import Path
from actors import assembly

async def main():
    import ray
    async with assembly.connected(None, Path(sys.argv[1])):
        print(len(ray.nodes()), ray.get_runtime_context().gcs_address)

asyncio.run(main())
"""


def python(program: str, *words: str) -> list[str]:
    """Arguments of Popen that run ``program``."""
    return [sys.executable, "-c", program, *words]


@dataclass(frozen=True)
class Running:
    """The cluster."""

    process: subprocess.Popen[str]
    address: str

    def ask(self) -> dict[str, Any]:
        """What a driver sees that attaches to it."""
        done = subprocess.run(
            python(ASK, self.address),
            env={**os.environ, **ENV},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def assert_as_it_was(self) -> None:
        """All nodes, no actor, no group, every CPU. Ray books the end of a job when it hears."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self.ask()
            clean = not found["actors"] and not found["groups"] and found["free"] == found["cpus"]
            if clean or time.monotonic() > deadline:
                break
        assert [node["Alive"] for node in found["nodes"]] == [True] * NODES
        assert (found["actors"], found["groups"], found["named"]) == ([], [], [])
        assert found["free"] == found["cpus"] == NODES
        assert self.process.poll() is None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    """Three nodes of one CPU."""
    with running(ENV, NODES) as found:
        yield found


@contextmanager
def running(
    environment: dict[str, str], nodes: int, more: dict[str, object] | None = None
) -> Iterator[Running]:
    """A cluster of ``nodes`` of one CPU (and ``more``); ended by the end of its standard input."""
    process = subprocess.Popen(
        python(CLUSTER, str(nodes), json.dumps(more or {})),
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    too_slow = threading.Timer(2 * DEADLINE_S, process.kill)
    too_slow.start()
    children: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        too_slow.cancel()
        assert address, "the cluster did not come up"
        children = psutil.Process(process.pid).children(recursive=True)
        yield Running(process, address)
    finally:
        too_slow.cancel()
        try:
            process.communicate("", timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        for left in psutil.wait_procs(children, timeout=10)[1]:
            left.kill()


def test_a_run_over_three_nodes_moves_weights_and_leaves_the_cluster_as_it_was(
    cluster: Running, tmp_path: Path
) -> None:
    """Case 37."""
    ended = command(
        "-m orchestrator",
        [
            *("--ray-address", cluster.address, "--engines", "2", "--steps", "1"),
            *("--validate", "digest", "--probe-tokens", "20"),
        ],
        tmp_path / "run",
        env=ENV,
        timeout=500,
    )
    assert ended.code == 0, ended.stderr
    (swap,) = ended.summary["swaps"]
    assert (swap["from_version"], swap["to_version"]) == (0, 1)
    assert swap["checks"]["digest"]["verdict"] == "match"

    events = ended.lines("events.jsonl")
    up = [e["node"] for e in events if e["event"] in ("engine up", "trainer started")]
    assert len(set(up)) == len(up) == NODES
    (channel,) = [e for e in events if e["event"] == "channel listens"]
    assert not nodes.is_loopback(channel["host"])
    assert ended.left == ()
    cluster.assert_as_it_was()


def test_a_killed_driver_leaves_nothing_on_the_cluster(cluster: Running, tmp_path: Path) -> None:
    """Case 31: nothing is detached or has a name, so nobody finds it again."""
    for _ in range(2):
        with subprocess.Popen(
            python(DRIVER, cluster.address, str(tmp_path)),
            cwd=ROOT,
            env={**os.environ, **ENV, "PYTHONPATH": str(ROOT), "NCCL_PROTO": "Simple"},
            stdout=subprocess.PIPE,
            text=True,
        ) as driver:
            killer = threading.Timer(DEADLINE_S, driver.kill)
            killer.start()
            assert driver.stdout is not None
            where = json.loads(driver.stdout.readline())
            tenants = [psutil.Process(pid) for pid, *_ in where]
            assert len({node for _, node, *_ in where[:NODES]}) == NODES
            there = cluster.ask()
            assert len(there["groups"]) == len(there["actors"]) == len(where)
            assert there["named"] == []
            driver.send_signal(signal.SIGKILL)
            driver.wait(timeout=DEADLINE_S)
            killer.cancel()
        assert psutil.wait_procs(tenants, timeout=DEADLINE_S)[1] == []
        cluster.assert_as_it_was()
    for _, _, address, (path, protocol) in where:
        assert not nodes.is_loopback(address)
        assert str(ROOT) in path.split(os.pathsep) and protocol == "Simple"


def test_loopback_is_refused_for_the_other_nodes(cluster: Running) -> None:
    """Case 37: by Ray's ids, which differ where the machine is the same."""
    table = cluster.ask()["nodes"]
    own = table[0]["NodeID"]
    with pytest.raises(ConfigError, match=r"knows the trainer's node as 127\.0\.0\.1"):
        nodes.refuse_loopback("127.0.0.1", own, table)
    nodes.refuse_loopback(table[0]["NodeManagerAddress"], own, table)


def test_auto_finds_the_cluster_of_the_environment(
    cluster: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = look("auto")
    assert found is not None
    assert (found.cores, found.gpus) == (NODES, ())
    assert found.cpu == f"Ray cluster of {NODES} nodes"


def test_the_gpus_of_a_cluster_are_seen_from_a_driver_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that wants a token, as those that `ray start` makes do; ``auto`` finds the token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
    node = {"num_gpus": 3, "resources": {"accelerator_type:H200": 1}}
    with running({**ENV, **token}, 1, node) as one:
        for name, value in token.items():
            monkeypatch.setenv(name, value)
        found = look(one.address)
        assert found is not None and found.gpus == ("H200",) * 3
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        with pytest.raises(ConfigError, match=r"does not let us in.*RAY_AUTH_MODE=token"):
            look(one.address)
        for name in ("RAY_ADDRESS", *token):
            monkeypatch.delenv(name, raising=False)
        for name in ("HOME", "RAY_TMPDIR"):
            monkeypatch.setenv(name, str(tmp_path))
        for name, text in (
            (".ray/auth_token", token["RAY_AUTH_TOKEN"]),
            ("ray/ray_current_cluster", one.address),  # what `ray start` leaves
        ):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text(text)
        found = look("auto")
        assert found is not None and found.gpus == ("H200",) * 3


def test_without_the_flag_no_cluster_is_attached_to(cluster: Running, tmp_path: Path) -> None:
    """Case 37: not even one that the environment names."""
    done = subprocess.run(
        python(LOCAL, str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, **ENV, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    count, address = done.stdout.split()
    assert count == "1" and address != cluster.address
