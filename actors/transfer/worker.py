"""Methods that vLLM mixes into every worker (``worker_extension_cls``), called by RPC.

Names carry a prefix because vLLM refuses an extension that hides a worker's own attribute. None
raises: see ``wire_errors``.
"""

from __future__ import annotations

from typing import Any

from .wire_errors import answered


class WorkerExtension:
    """``self`` is the worker; its transfer engine is a receiver of ours."""

    weight_transfer_engine: Any
    _weight_update_active: bool
    init_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    @answered
    def midflight_open(self, invitation: dict[str, Any]) -> None:
        """Join a channel (see Receiver.init_transfer_engine)."""
        self.init_weight_transfer_engine({"invitation": invitation})

    @answered
    def midflight_describe(self) -> str:
        """How updates are applied here, in words."""
        return str(self.weight_transfer_engine.describe())

    @answered
    def midflight_prefetch(self, sync_id: str, key: str) -> None:
        """Start to fetch an update; returns at once (see Receiver.start_prefetch)."""
        self.weight_transfer_engine.start_prefetch(sync_id, key)

    @answered
    def midflight_replay(self, sync_id: str) -> bool:
        """Queue the load plan's copies of an update that is at hand; False, and nothing done, where
        that is not all there is to do.
        """
        engine = self.weight_transfer_engine
        return not self._weight_update_active and engine.at_hand and bool(engine.replay(sync_id))

    @answered
    def midflight_apply(self, sync_id: str) -> None:
        """A whole update in one call: by the load plan, else by vLLM's layerwise reload.

        An update that failed before is forgotten.
        """
        if self._weight_update_active:
            self.weight_transfer_engine.forget()
            self.weight_transfer_engine.reset_weight_update_target()
            self._weight_update_active = False
        if not self.weight_transfer_engine.replay(sync_id):
            self.start_weight_update()
            self.update_weights({"sync_id": sync_id})
            self.finish_weight_update()

    @answered
    def midflight_device_seconds(self) -> float | None:
        """What the last replayed plan took on the device (see Receiver.device_seconds)."""
        found: float | None = self.weight_transfer_engine.device_seconds()
        return found

    @answered
    def midflight_close(self) -> None:
        """Leave the channel. What the model holds stays as it is."""
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.leave("the engine left")

    @answered
    def midflight_digest(self, key: str) -> None:
        """Start to digest; returns at once (see Receiver.start_digest)."""
        self.weight_transfer_engine.start_digest(key)
