"""Which NCCL is here, and whether vLLM can use it: asked before anybody waits for anybody.

vLLM swallows a failure to load NCCL, and every broadcast is then a no-op that reports success.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from actors import vllm_compat
from orchestrator.errors import ChannelError, ConfigError

from . import vllm_nccl

NEEDED = "2.29.7"
"""The first NCCL with ncclCommSuspend and ncclCommResume, which vLLM 0.32 and later bind."""
_OPTIONAL = {"ncclCommQueryProperties", "ncclCommWindowRegister", "ncclCommWindowDeregister"}

_MUST_AGREE = (
    "NCCL_ALGO",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_DISABLE",
    "NCCL_PROTO",
)
"""Each rank reads them from its own environment and plans by them: ranks that differ hang."""


def description() -> str:
    """``NCCL 2.29.7``. ChannelError, saying what was found and what is needed, if unusable."""
    wrapper = vllm_nccl.nccl_wrapper()
    try:
        version = wrapper.NCCLLibrary().ncclGetVersion()
    except Exception as error:
        raise ChannelError(_why_not(wrapper, error)) from error
    return f"NCCL {version}"


def must_be_enabled(communicator: Any, rank: int) -> None:
    """ChannelError for a communicator whose broadcasts would do nothing."""
    if communicator.disabled or not communicator.available:
        raise ChannelError(
            f"rank {rank}: vLLM found {description()} and disabled its communicator, nothing would "
            "be sent: unset VLLM_DISABLE_PYNCCL, or use another backend"
        )


def settings() -> dict[str, str]:
    """What the environment tells NCCL here that all ranks must be told alike."""
    with vllm_nccl.shared_nccl_env():
        return {name: os.environ[name] for name in _MUST_AGREE if name in os.environ}


def must_agree(theirs: Mapping[str, str]) -> None:
    """ChannelError, naming what differs, unless the trainer's :func:`settings` are ours."""
    ours = settings()
    unlike = [
        f"{name} is {theirs.get(name, 'unset')} at the trainer and {ours.get(name, 'unset')} here"
        for name in _MUST_AGREE
        if theirs.get(name) != ours.get(name)
    ]
    if unlike:
        raise ChannelError(
            f"NCCL's settings differ, and ranks that differ hang: {', '.join(unlike)}. Set them "
            "alike for both (a batch-invariant vLLM sets its own, and can lift them only with NCCL "
            f"{NEEDED} or later)"
        )


def _why_not(wrapper: Any, error: Exception) -> str:
    try:
        name = wrapper.find_nccl_library()
        library = ctypes.CDLL(name)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, ValueError, AttributeError) as missing:
        return f"found no NCCL library ({missing}): {_remedy()}"
    found = f"found NCCL {_dotted(number.value)} ({_path(name)})"
    wanted = (function.name for function in wrapper.NCCLLibrary.exported_functions)
    lacking = [name for name in wanted if not hasattr(library, name) and name not in _OPTIONAL]
    if not lacking:
        return f"{found}, but vLLM cannot use it: {type(error).__name__}: {error}"
    if _parts(_dotted(number.value)) < _parts(NEEDED):
        return (
            f"{found}, {_vllm()} needs {NEEDED} or later because of {', '.join(lacking)}: "
            f"{_remedy()}"
        )
    return f"{found}, which lacks {', '.join(lacking)} that {_vllm()} needs: {_remedy()}"


def _remedy() -> str:
    cuda = (torch.version.cuda or "13").partition(".")[0]
    return (
        f"pip install 'nvidia-nccl-cu{cuda}>={NEEDED}', set VLLM_NCCL_SO_PATH to one, or use "
        "backend ipc (one GPU) or gloo"
    )


def _vllm() -> str:
    with contextlib.suppress(ConfigError):
        return f"vLLM {vllm_compat.vllm_version()}"
    return "vLLM"


def _dotted(number: int) -> str:
    """22907 -> 2.29.7, and 2804 -> 2.8.4: the encoding changed with 2.9."""
    thousand = 1000 if number < 10000 else 10000
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _parts(dotted: str) -> tuple[int, ...]:
    return tuple(int(part) for part in dotted.split("."))


def _path(name: str) -> str:
    """The file that ``name`` was loaded from. torch may have loaded another one."""
    if "/" in name:
        return os.path.abspath(name)
    stem = Path(name).name.partition(".so")[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path and Path(path).name.startswith(stem + ".so"):
                return f"/{path}"
    return name
