"""Methods that vLLM mixes into every worker (``worker_extension_cls``), called by RPC.

Names carry a prefix because vLLM refuses an extension that hides a worker's own attribute.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """``self`` is the worker; its transfer engine is a receiver of ours."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def midflight_forget(self) -> None:
        """Forget an update that failed, so that a whole new one can start."""
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.forget()
            self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False

    def midflight_close(self) -> None:
        """Leave the channel. What the model holds stays as it is."""
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.leave("the engine left")

    def midflight_digest(self, key: str) -> None:
        """Start digesting what was received; returns at once (see Receiver.start_digest)."""
        self.weight_transfer_engine.start_digest(key)
