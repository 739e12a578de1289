"""The policy of the fakes: tokens and logprobs as a pure function of weights and context.

There is nothing to learn in it. What counts: the same weights and the same context give the
same token everywhere, other weights give another one (511 times in 512), and a context whose
cache was computed under other weights gives another one too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.types import TensorSpec

VOCAB = 512

Weights = Mapping[str, bytes]


def make_weights(seed: int | str, sizes: Mapping[str, int] | None = None) -> dict[str, bytes]:
    """Deterministic tensors; ``sizes`` has the bytes of each."""
    sizes = sizes or {"embed": 64, "layers.0": 96, "layers.1": 96, "head": 32}
    return {name: _stream(f"{seed}/{name}".encode(), size) for name, size in sizes.items()}


def next_weights(weights: Weights, salt: Iterable[int]) -> dict[str, bytes]:
    """The weights after a train step on ``salt`` (the tokens of the batch)."""
    tail = _tokens(tuple(salt))
    return {name: _stream(data + tail, len(data)) for name, data in weights.items()}


def weights_key(weights: Weights) -> bytes:
    """What the policy depends on: all bytes of all tensors."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + b"\0" + hashlib.sha256(weights[name]).digest())
    return total.digest()


def digest(data: bytes) -> str:
    """Digest of one tensor's bytes."""
    return hashlib.sha256(data).hexdigest()


def digests(weights: Weights) -> dict[str, str]:
    """Digest of each tensor."""
    return {name: digest(data) for name, data in weights.items()}


def specs(weights: Weights) -> tuple[TensorSpec, ...]:
    """The tensors as a channel announces them."""
    return tuple(TensorSpec(n, "uint8", (len(d),), len(d)) for n, d in weights.items())


def next_token(key: bytes, context: Sequence[int], salt: bytes = b"") -> int:
    """The token after ``context``. ``salt``: sampling noise, or a cache of other weights."""
    return _number(b"token", key, _tokens(context), salt) % VOCAB


def logprob(key: bytes, context: Sequence[int], token: int) -> float:
    """Log-probability of ``token`` after ``context``, in [-8, 0)."""
    return -8.0 * (1 + _number(b"logprob", key, _tokens((*context, token)))) / 2**32


def prompt_logprobs(key: bytes, prompt: Sequence[int]) -> tuple[float, ...]:
    """Log-probability of each token of ``prompt`` but the first."""
    return tuple(logprob(key, prompt[:i], prompt[i]) for i in range(1, len(prompt)))


def text_of(tokens: Sequence[int]) -> str:
    """Readable stand-in for a detokenizer: ``<7><501>``."""
    return "".join(f"<{t}>" for t in tokens)


def pattern(nonce: str) -> bytes:
    """What proves a channel."""
    return _stream(nonce.encode(), 32)


def _tokens(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _number(*parts: bytes) -> int:
    total = hashlib.blake2b(digest_size=4)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(total.digest(), "little")


def _stream(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)
