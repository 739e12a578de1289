"""Which machine this is, to whom its addresses mean something, and what goes with a job to others.

Needs neither torch nor vLLM; Ray only where it says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

_CARRIED = ("NCCL_", "VLLM_")
_NOT_CARRIED = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HOST", "PORT")
"""Parts of names: secrets would show in Ray's tables, addresses are of one node."""


def node_id() -> str:
    """Differs between machines, even where they share a host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def network_id() -> str:
    """Differs where loopback does: between machines, and between containers of one machine."""
    with contextlib.suppress(OSError):
        return f"{node_id()} {os.readlink('/proc/self/ns/net')}"
    return node_id()


def is_loopback(host: str) -> bool:
    """Whether ``host`` only means this very machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ray_node() -> str:
    """Ray's id of the node that this process runs on; empty without Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def node_address() -> str:
    """This node's address as Ray knows it (ConfigError without Ray)."""
    import ray

    if not ray.is_initialized():
        raise ConfigError("host 'auto' asks Ray for this node's address: pass one outside of Ray")
    return str(ray.util.get_node_ip_address())


def check_address(address: str) -> None:
    """ConfigError if ``address`` of this node means another machine to a node of the cluster."""
    import ray

    refuse_loopback(address, ray_node(), ray.nodes())


def refuse_loopback(address: str, own: str, nodes: Iterable[Mapping[str, Any]]) -> None:
    """ConfigError if ``address`` of node ``own`` means another machine to one of ``nodes``.

    ``nodes``: as ``ray.nodes()`` has them. Nodes that Ray knows by one address are one machine.
    """
    if not is_loopback(address):
        return
    others = sorted(
        str(node["NodeManagerAddress"])
        for node in nodes
        if node["Alive"] and node["NodeID"] != own and node["NodeManagerAddress"] != address
    )
    if others:
        raise ConfigError(
            f"Ray knows the trainer's node as {address}, which means another machine to the nodes "
            f"at {', '.join(others)}: start Ray there with --node-ip-address and an address that "
            "they can reach"
        )


def carried_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of this process that actors on a cluster started by others must have too.

    How NCCL and vLLM are set up, and where this code lies if it is not installed. What a node
    has in PYTHONPATH itself stays.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_CARRIED) and not any(part in name for part in _NOT_CARRIED)
    }
    folders = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    root = Path(__file__).resolve().parents[1]
    if root != Path(sysconfig.get_path("purelib")).resolve():
        folders.append(str(root))
    if folders:
        found["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(folders), "${PYTHONPATH}"])
    return found
