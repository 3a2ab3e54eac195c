"""Which kernel computes a call. A backend says why it refuses; nothing falls back in silence."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headwise.backends import int8
from headwise.backends.native import Native
from headwise.backends.reference import Reference
from headwise.backends.sdpa import Sdpa
from headwise.call import AttentionCall
from headwise.quantized import QuantizedCall


class Backend(Protocol):
    """What a backend offers. `seed` says where dropout is drawn from, None for no dropout."""

    name: str

    def refuse(self, call: AttentionCall) -> str | None:
        """Why this backend cannot compute the call, or None when it can."""

    def forward(
        self, call: AttentionCall, seed: int | None, need_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, Hq, L, Dv) in the call's dtype and lse (B, Hq, L), None if not needed."""

    def backward(
        self,
        call: AttentionCall,
        seed: int | None,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        need_bias: bool,
    ) -> dict[str, Tensor]:
        """Gradients by name: query, key, value, and bias and sinks where the call has them."""


# In order of preference. The float64 definition is for checking, so it is only taken by name.
BACKENDS: tuple[Backend, ...] = (Native(), Sdpa(), Reference())


def choose(call: AttentionCall, backend: str | None = None) -> Backend:
    """The backend that computes `call`: the first that accepts it, or the one named.

    Raises:
        ValueError: an unknown name (the names are listed), or the named backend refuses (with its
            reason).
    """
    if backend is not None:
        named = get(backend)
        reason = named.refuse(call)
        if reason is not None:
            raise ValueError(f"attention: backend {backend!r} refuses this call: {reason}")
        return named
    for candidate in BACKENDS:
        if candidate.refuse(call) is None:
            return candidate
    reasons = "; ".join(f"{name}: {reason}" for name, reason in explain(call).items())
    raise ValueError(f"attention: no backend takes this call ({reasons})")


def explain(call: AttentionCall | QuantizedCall) -> dict[str, str | None]:
    """Each backend's reason to refuse `call`, in order of preference; None means it accepts."""
    if isinstance(call, QuantizedCall):
        return {path.name: path.refuse(call) for path in int8.PATHS}
    return {backend.name: backend.refuse(call) for backend in BACKENDS}


def get(name: str) -> Backend:
    """The backend with this name.

    Raises:
        ValueError: no such backend; the names are listed.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ValueError(f"attention: unknown backend {name!r}; there are {names}")
