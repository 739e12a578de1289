"""The Ray cluster that a run attaches to, looked at before anything is started on it.

Asked in a process of its own: Ray itself would retry for minutes, and a client that waits for
something that listens and says nothing cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from actors.hardware import Hardware, is_rocm
from orchestrator.errors import ConfigError

CONNECT_S = 10.0
"""What a Ray cluster may take to answer."""
_KIND = "accelerator_type:"
"""Ray's resource that names a node's GPUs."""
_OTHERS = ("AMD-", "Intel-")
"""How it names those that are not NVIDIA's."""
_ASK = """
import json, sys
from ray._private.services import canonicalize_bootstrap_address_or_die as found
from ray._raylet import GcsClient
if sys.argv[1] == "auto":
    # As ray.init does it: a cluster found on this machine may have the token of this user.
    from ray._private.authentication import authentication_token_setup as tokens
    # Not in every Ray that is supported: those without it do not look for a token either.
    if enable := getattr(tokens, "maybe_enable_token_auth_if_token_available", None):
        enable(warn_if_disabled=False)
address = found("auto") if sys.argv[1] == "auto" else sys.argv[1]
nodes = GcsClient(address=address).get_all_node_info(timeout=5).values()
print(json.dumps([dict(node.resources_total) for node in nodes if node.state == 0]))
"""


def look(address: str) -> Hardware | None:
    """What the cluster at ``address`` has in all; None if it cannot be asked (``ray://``).

    ConfigError unless a cluster answers within about CONNECT_S.
    """
    asked, named, problem = address, f"--ray-address {address!r}", "it answers wrongly"
    ends = time.monotonic() + CONNECT_S
    nodes: list[dict[str, float]] | None = None
    if address == "auto" and (known := os.environ.get("RAY_ADDRESS")):
        asked, named = known, f"{named} (RAY_ADDRESS is {known!r})"
    try:
        if asked != "auto":
            host, _, port = asked.removeprefix("ray://").rpartition(":")
            with socket.create_connection((host, int(port)), timeout=CONNECT_S):
                pass
        if asked.startswith("ray://"):
            return None
        answer = subprocess.run(
            [sys.executable, "-c", _ASK, asked],
            capture_output=True,
            text=True,
            timeout=max(0.0, ends - time.monotonic()),
            check=False,
        )
        if answer.returncode == 0:
            nodes = json.loads((answer.stdout.splitlines() or [""])[-1])
        else:
            problem = (answer.stderr.strip().splitlines() or [problem])[-1]
    except subprocess.TimeoutExpired:
        there = "what is on this machine" if asked == "auto" else "something listens there, but"
        problem = f"{there} gave no answer within {CONNECT_S:g} s"
    except (OSError, ValueError) as error:
        problem = str(error)
    if nodes is not None:
        return summed(nodes)
    if "AuthenticationError" in problem:
        raise ConfigError(
            f"the Ray cluster at {named} does not let us in: it wants a token. Set "
            "RAY_AUTH_MODE=token and have the cluster's in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    raise ConfigError(
        f"no Ray cluster at {named}: {problem}. Start one with `ray start --head`, or leave "
        "the flag out for a local one"
    )


def summed(nodes: Sequence[Mapping[str, float]]) -> Hardware:
    """All ``nodes`` as one, each as Ray's resources of it (ConfigError for unlike GPUs).

    GPUs that Ray has no name for are taken for those of this machine's maker, NVIDIA's otherwise.

    >>> summed([{"CPU": 4, "memory": 2**30, "GPU": 2, "accelerator_type:H200": 1}]).describe()
    'Ray cluster of 1 node, 4 cores, 1 GB, 2 x H200'
    """
    gpus: list[str] = []
    for node in nodes:
        kinds = [key.removeprefix(_KIND) for key in node if key.startswith(_KIND)]
        gpus += [kinds[0] if kinds else "GPU"] * int(node.get("GPU", 0))
    makers = {kind.partition("-")[0] if kind.startswith(_OTHERS) else "" for kind in gpus}
    if len(makers) > 1 or makers - {"", "AMD"}:
        raise ConfigError(
            f"the Ray cluster has {', '.join(sorted(set(gpus)))}: GPUs must be NVIDIA's or AMD's, "
            "and of one maker. Choose nodes of one kind"
        )
    rocm = makers == {"AMD"} or (set(gpus) == {"GPU"} and is_rocm())
    return Hardware(
        cpu=f"Ray cluster of {len(nodes)} node{'s' if len(nodes) != 1 else ''}",
        cores=int(sum(node.get("CPU", 0) for node in nodes)),
        memory_gb=sum(node.get("memory", 0) for node in nodes) / 2**30,
        gpus=tuple(gpus),
        rocm=rocm,
    )
