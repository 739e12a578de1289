"""Under which name vLLM finds the receiver of each backend."""

from __future__ import annotations

from orchestrator.types import TransferBackend

ENGINE_NAMES: dict[TransferBackend, tuple[str, str]] = {
    TransferBackend.GLOO: ("gloo", "GlooReceiver"),
    TransferBackend.NCCL: ("midflight_nccl", "NcclReceiver"),
    TransferBackend.IPC: ("midflight_ipc", "IpcReceiver"),
}
"""Backend -> (name in vLLM's registry, class in ``actors.transfer.receiver``)."""

WORKER_EXTENSION = "actors.transfer.worker.WorkerExtension"
"""Methods that every vLLM worker gets."""
