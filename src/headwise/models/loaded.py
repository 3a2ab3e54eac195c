"""What a loaded model is: the module, its kind, and how to turn a person's input into its
tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import BadInput

AxisValues = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One input, ready for `model(*args, **kwargs)`, and the token axes that its attention runs
    over.

    `axes` maps an axis name to the values of the report's `axis` record. `stacks` maps a stack of
    the model ("" where it has one, else "encoder" and "decoder") to the name of its axis:
    self-attention of a stack runs over that axis, cross-attention of a decoder reads the encoder's.
    `kind` is "text", "image", "audio" or "module"; `note` is one line for the reader, or "".
    """

    kind: str
    axes: Mapping[str, AxisValues]
    stacks: Mapping[str, str]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    note: str = ""

    def to(self, device: torch.device) -> Inputs:
        """The same input with its tensors on `device`."""
        return Inputs(
            self.kind,
            self.axes,
            self.stacks,
            {name: _move(value, device) for name, value in self.kwargs.items()},
            tuple(_move(value, device) for value in self.args),
            self.note,
        )


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


class Preparer(Protocol):
    """Turns what a person gives into tensors and axes. `takes` lists the keywords it
    understands."""

    takes: tuple[str, ...]

    def __call__(self, model: nn.Module, **given: Any) -> Inputs: ...


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode with what its input needs.

    `kind` is "causal", "encoder", "encoder-decoder", "vision", "speech" or "module". `processor` is
    the tokenizer (text and speech models) or None. `licence` and `about` are known for packaged
    models.
    """

    name: str
    source: str
    model: nn.Module
    kind: str
    preparer: Preparer
    processor: Any = None
    licence: str = ""
    about: str = ""

    @property
    def takes(self) -> tuple[str, ...]:
        """The inputs that `prepare` understands, of "text", "image" and "audio"; () for a
        module."""
        return self.preparer.takes

    @property
    def device(self) -> torch.device:
        """The device of the first parameter (cpu where there is none)."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter (float32 where there is none)."""
        kinds = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(kinds, torch.float32)

    def prepare(
        self,
        *,
        text: str | None = None,
        image: str | Path | None = None,
        audio: str | Path | None = None,
    ) -> Inputs:
        """Tensors on the model's device, and the axes, for one input.

        Text models take `text`. Image models take `image`, a file's path. Speech models take
        `audio`, a file's path of at most 30 s for Whisper, and optionally `text` (the transcript to
        score; without it the model's own greedy transcript is used). A plain module takes nothing:
        its factory gave the example inputs.

        Raises:
            BadInput: an input is missing, empty, too long, unreadable, or of a kind the model
            lacks.
        """
        given = {"text": text, "image": image, "audio": audio}
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in self.takes:
                wanted = " and ".join(f"--{kind}" for kind in self.takes) or "no input"
                kind = "an" if self.kind[0] in "aeiou" else "a"
                raise BadInput(
                    f"{self.name} is {kind} {self.kind} model and takes {wanted}, not --{name}"
                )
        return self.preparer(self.model, **given).to(self.device)

    def run(self, inputs: Inputs) -> Any:
        """One forward pass under `torch.inference_mode`, and the model's own output.

        A language model computes the logits of the last token only and keeps no KV cache: at 8,000
        tokens all logits of SmolLM2 alone would take 1.6 GB.
        """
        with torch.inference_mode():
            return self.model(*inputs.args, **inputs.kwargs)


Say = Callable[[str], None]
