"""Whether a worker may apply updates by a load plan, and what its model holds by that plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from actors import vllm_compat
from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TensorSpec

from .digest import Part, parts_of
from .layout import Layout
from .plan import LoadPlan, NoPlan, Unfit


class Planned:
    """The plan of one worker's model: none (and why), recorded, or proven."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._reason = "no channel was opened"
        self._specs: tuple[TensorSpec, ...] = ()
        self._plan: LoadPlan | None = None
        self._proven = False

    @property
    def proven(self) -> LoadPlan | None:
        """The plan, once it may be used."""
        return self._plan if self._proven else None

    @property
    def wants_proof(self) -> bool:
        """There is a plan that no update has confirmed."""
        return self._plan is not None and not self._proven

    def describe(self) -> str:
        """In words."""
        if self._plan is None:
            return f"layerwise reload, no load plan: {self._reason}"
        state = "proven" if self._proven else "to be proven by the first update"
        return f"load plan of {len(self._plan.copies)} copies, {state}"

    def record(self, layout: Layout) -> None:
        """Make a plan for ``layout``, unless there is one for it already.

        ChannelError if the tensors do not fit the model: no way to load them would work.
        """
        specs = tuple(slot.spec for slot in layout.slots)
        if self._plan is not None and specs == self._specs and self._plan.fits(self._model):
            return
        self._specs, self._plan, self._proven = specs, None, False
        derived = list(vllm_compat.derived_weights(self._model))
        if derived:
            more = f" (and {len(derived) - 1} more)" if len(derived) > 1 else ""
            self._reason = f"{derived[0]}{more}"
            return
        try:
            plan = LoadPlan.record(self._model, specs)
        except Unfit as error:
            raise ChannelError(
                f"the trainer's tensors do not fit the engine's model: {error}. Both sides need "
                "one architecture, and names as in the checkpoint"
            ) from error
        except NoPlan as error:
            self._reason = str(error)
            return
        if plan.lossy:
            self._reason = f"the model holds {plan.lossy[0]} in fewer bits than are sent"
            return
        self._plan = plan

    def prove(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Trust the plan if vLLM's own loader put ``arrived`` where the plan would have.

        Runs after a layerwise reload. A plan that fails is dropped, with the tensor as reason.
        """
        plan = self._plan
        assert plan is not None
        try:
            sources = ((c.name, c.source, c.source.of(arrived[c.name])) for c in plan.copies)
            sent, held = parts_of(sources, self._shapes()), self._parts(plan)
        except Exception as error:
            self._drop(f"it could not be checked: {type(error).__name__}: {error}")
            return
        wrong = [name for name, part in sent.items() if held.get(name) != part]
        if wrong:
            self._drop(
                f"vLLM's own loader leaves {wrong[0]} otherwise than it came "
                f"({len(wrong)} such tensors): it is re-packed after loading"
            )
        else:
            self._proven = True

    def parts(self) -> dict[str, Part]:
        """Digest of what the model holds, by checkpoint tensor (TransferError without a plan)."""
        if self._plan is None:
            raise TransferError(f"what the model holds cannot be read back: {self._reason}")
        return self._parts(self._plan)

    def _parts(self, plan: LoadPlan) -> dict[str, Part]:
        if not plan.fits(self._model):
            self._drop("the model's parameters have moved since it was recorded")
            raise TransferError("the model's parameters have moved: apply the update again")
        return parts_of(plan.live(), self._shapes())

    def _drop(self, reason: str) -> None:
        self._plan, self._proven, self._reason = None, False, reason

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self._specs}
