"""``--ray-address``: a run on a cluster that is there already, and stays (case 37)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from .command import command, describe

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

# Where Ray keeps the token of a user's local clusters is not what is tested here.
ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
ASK = """
import json, sys, ray
from ray.util import list_named_actors
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({
    "alive": [node["Alive"] for node in ray.nodes()],
    "named": list_named_actors(all_namespaces=True),
    "cpus": ray.cluster_resources()["CPU"],
    "free": ray.available_resources()["CPU"],
}))
"""


@dataclass(frozen=True)
class Cluster:
    """A head node of ours."""

    process: subprocess.Popen[str]
    address: str

    def ask(self) -> dict[str, Any]:
        """What a driver sees that attaches to it."""
        done = subprocess.run(
            [sys.executable, "-c", ASK, self.address],
            env={**os.environ, **ENV},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """``ray start --head`` in a folder of its own; ended by its own pid."""
    # Not tmp_path: a Unix socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="mf-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        words = f"start --head --block --port {port} --num-cpus 4 --include-dashboard false"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts"),
                *(*words.split(), "--disable-usage-stats", "--temp-dir", folder),
            ],
            env={**os.environ, **ENV},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        too_slow = threading.Timer(60, process.kill)
        too_slow.start()
        said: list[str] = []
        children: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if "--block" in line:
                    break
            too_slow.cancel()
            assert process.poll() is None, "".join(said)
            running = Cluster(process, f"127.0.0.1:{port}")
            children = running.children()
            yield running
        finally:
            too_slow.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=30)
            finally:
                for left in psutil.wait_procs(children, timeout=5)[1]:
                    left.kill()


def test_a_run_attaches_moves_weights_and_leaves_the_cluster_as_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = cluster.ask()
    ended = command(
        "-m orchestrator",
        [
            *("--ray-address", cluster.address, "--steps", "1", "--tensor-parallel-size", "2"),
            *("--validate", "digest,canary", "--probe-tokens", "40", "--backend", "staged"),
        ],
        tmp_path / "run",
        env=ENV,
    )
    assert ended.code == 0, ended.stderr
    (swap,) = ended.summary["swaps"]
    assert (swap["from_version"], swap["to_version"]) == (0, 1)
    assert swap["backend"] == "staged-gloo" and swap["seconds"]["prefetch"] > 0
    assert swap["checks"]["digest"]["verdict"] == swap["checks"]["canary"]["verdict"] == "match"

    events = ended.lines("events.jsonl")
    (engine,) = [e for e in events if e["event"] == "engine started"]
    (channel,) = [e for e in events if e["event"] == "channel listens"]
    # Engines on other nodes could join too.
    assert channel["host"] == engine["node_ip"]
    assert engine["workers"] == 2

    assert cluster.process.poll() is None
    after = cluster.ask()
    assert after == before
    assert after["alive"] == [True] and after["named"] == []
    assert after["free"] == after["cpus"] == 4
    ours = ("EngineActor", "TrainerActor", "EngineCore", "VLLM")
    left = [describe(process) for process in cluster.children()]
    assert [line for line in left if any(word in line for word in ours)] == []


@pytest.mark.parametrize("listens", [False, True])
def test_an_address_without_ray_fails_within_fifteen_seconds(tmp_path: Path, listens: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1] if listens else free_port()
        ended = command(
            "-m orchestrator",
            ["--ray-address", f"127.0.0.1:{port}", "--steps", "1"],
            tmp_path / "run",
            env=ENV,
        )
    assert ended.code == 2
    assert ended.seconds < 15
    (line,) = ended.stderr.splitlines()
    assert f"no Ray cluster at --ray-address '127.0.0.1:{port}'" in line
    assert ("gave no answer" if listens else "refused") in line
    assert ended.left == () and not ended.folder.exists()


def test_auto_without_a_cluster_fails_within_fifteen_seconds(tmp_path: Path) -> None:
    """The environment names one that is gone: other clusters of this machine do not count."""
    gone = f"127.0.0.1:{free_port()}"
    ended = command(
        "-m orchestrator",
        ["--ray-address", "auto", "--steps", "1"],
        tmp_path / "run",
        env={**ENV, "RAY_ADDRESS": gone},
    )
    assert ended.code == 2
    assert ended.seconds < 15
    (line,) = ended.stderr.splitlines()
    assert f"no Ray cluster at --ray-address 'auto' (RAY_ADDRESS is '{gone}')" in line
    assert "refused" in line
    assert ended.left == () and not ended.folder.exists()
