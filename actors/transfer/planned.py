"""Whether a worker may apply updates by a load plan, and what its model holds by that plan.

A plan is trusted after vLLM's own loader has loaded one update and the weights, read back through
the plan, were found to be what arrived: the first update always takes the layerwise reload.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TensorSpec

from . import vllm_model
from .digest import Digester, Part, parts_of
from .layout import Layout
from .plan import LoadPlan, NoPlan, Unfit, must_fit

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What torch's DistributedDataParallel, compile, FSDP and checkpointing put into names."""


class Planned:
    """The plan of one worker's model: none (and why), recorded, or proven."""

    def __init__(self, model: torch.nn.Module, refused: str = "") -> None:
        """``refused``: why there is never to be one."""
        self._model = model
        self._refused = refused
        self._reason = refused or "no channel was opened"
        self._specs: tuple[TensorSpec, ...] = ()
        self._plan: LoadPlan | None = None
        self._proven = False
        self._digester: Digester | None = None
        self._tied_names: dict[str, str] = {}
        """Of the unused tensors those that are held under another one's name -> that one."""

    @property
    def proven(self) -> LoadPlan | None:
        """The plan, if it may be used now."""
        plan = self._plan
        return plan if plan is not None and self._proven and plan.fits() else None

    @property
    def wants_proof(self) -> bool:
        """There is a plan that no update has confirmed."""
        return self._plan is not None and not self._proven

    @property
    def unused(self) -> Sequence[str]:
        """Tensors that the model has no place for."""
        if self._plan is None:
            return ()
        return [name for name in self._plan.unused if name not in self._tied_names]

    def describe(self) -> str:
        """In words."""
        if self._plan is None:
            return f"layerwise reload, no load plan: {self._reason}"
        state = "proven" if self._proven else "to be proven by the first update"
        return f"load plan of {len(self._plan.copies)} copies, {state}"

    def forget(self, reason: str) -> None:
        """There is no plan any more."""
        self._plan, self._proven, self._reason = None, False, reason
        self._digester, self._tied_names = None, {}

    def record(self, layout: Layout) -> None:
        """Make a plan for ``layout``, unless there is one for it already.

        ChannelError if the tensors do not fit the model: no way to load them would work.
        """
        specs = tuple(slot.spec for slot in layout.slots)
        if self._refused or (self._plan is not None and specs == self._specs and self._plan.fits()):
            return
        self.forget("")
        self._specs = specs
        derived = list(vllm_model.derived_weights(self._model))
        if derived:
            more = f" (and {len(derived) - 1} more)" if len(derived) > 1 else ""
            self._reason = f"{derived[0]}{more}"
            return
        try:
            with _misfits_end_the_channel(specs):
                plan = LoadPlan.record(self._model, specs)
        except NoPlan as error:
            self._reason = str(error)
            return
        if plan.lossy:
            self._reason = f"the model holds {plan.lossy[0]} in fewer bits than are sent"
            return
        self._plan = plan
        unused = frozenset(plan.unused)
        ties = vllm_model.tied_names(self._model, [spec.name for spec in specs])
        self._tied_names = {n: to for n, to in ties.items() if n in unused and to not in unused}

    def must_fit(self, layout: Layout) -> None:
        """ChannelError if the tensors do not fit a model whose weights are re-packed.

        :meth:`record` says so of the others, but for those that vLLM computes weights for: what
        these load is known when they have loaded it.
        """
        if self._refused or self._plan is not None or not vllm_model.only_packed(self._model):
            return
        specs = [slot.spec for slot in layout.slots]
        with _misfits_end_the_channel(specs), vllm_model.as_created(self._model):
            must_fit(self._model, specs)

    def prove(self, arrived: Mapping[str, torch.Tensor]) -> None:
        """Trust the plan if vLLM's own loader put ``arrived`` where the plan would have.

        Call it after a layerwise reload. Else TransferError: the model holds something that was
        not sent, and nobody could tell what.
        """
        plan = self._plan
        assert plan is not None
        try:
            sources = ((c.name, c.source, c.source.of(arrived[c.name])) for c in plan.copies)
            sent, held = parts_of(sources, self._shapes()), self.parts()
        except Exception as error:
            raise TransferError(
                "what vLLM's own loader left in the model could not be compared with what came: "
                f"{type(error).__name__}: {error}"
            ) from error
        wrong = [name for name, part in sent.items() if held.get(name) != part]
        if wrong:
            raise TransferError(
                f"vLLM's own loader left {wrong[0]} otherwise than it came ({len(wrong)} such "
                "tensors): another tensor was loaded over it (an output head that the engine's "
                "config ties to the embedding?), or this vLLM re-packs it. Send what the engine's "
                "checkpoint holds"
            )
        self._proven = True

    def parts(self) -> dict[str, Part]:
        """Digest of what the model holds, by checkpoint tensor (TransferError without a plan).

        Of a tensor that the model ties to another one: of that one, which it holds instead.
        """
        plan = self._plan
        if plan is None:
            raise TransferError(f"what the model holds cannot be read back: {self._reason}")
        if not plan.fits():
            raise TransferError("the model's parameters are not where the update was put")
        digester = self._digester or Digester(plan.live(), self._shapes())
        if not plan.widens:  # else it reads copies, made now
            self._digester = digester
        parts = digester.parts()
        return parts | {
            name: parts[first] for name, first in self._tied_names.items() if first in parts
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self._specs}


@contextlib.contextmanager
def _misfits_end_the_channel(specs: Sequence[TensorSpec]) -> Iterator[None]:
    """Unfit as a ChannelError: no way to load ``specs`` would work."""
    try:
        yield
    except Unfit as error:
        parts = {part for spec in specs for part in spec.name.split(".")}
        wrapped = next((f". {name!r} in names is a wrapper's" for name in _WRAPPERS & parts), "")
        raise ChannelError(
            f"the trainer's tensors do not fit the engine's model: {error}; both sides need "
            f"one architecture, and names as in the checkpoint{wrapped}"
        ) from error
