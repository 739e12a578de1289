"""Under which names vLLM finds our parts."""

from __future__ import annotations

ENGINE_NAME = "midflight"
"""Of the receiver in vLLM's registry of weight-transfer engines."""

WORKER_EXTENSION = "actors.transfer.worker.WorkerExtension"
"""Methods that every vLLM worker gets."""
