"""A run as `headwise.models.load` gives it, so that report, check and watch work on every task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise._extras import require
from headwise.models.loaded import AxisValues, Inputs, Loaded
from headwise.models.text import positions_axis
from headwise.models.vision import image_axis
from headwise.tasks.runs import Run, load


class ExamplePreparer:
    """The input that was kept with the run, its tokens by name. It takes no other."""

    takes: tuple[str, ...] = ()

    def __init__(self, read: Run) -> None:
        self.read = read

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        inputs, tokens = dict(self.read.inputs), self.read.tokens
        axis = _picture(inputs, len(tokens)) or named_axis(tokens)
        if "tgt" in inputs:
            # An encoder-decoder: the kept tokens are the source's, the target's are numbered.
            axes = {"source": axis, "target": positions_axis(inputs["tgt"].shape[1])}
            return Inputs("module", axes, {"encoder": "source", "decoder": "target"}, inputs)
        if "words" in inputs and "images" in inputs:
            # Two towers: the kept tokens are the picture's, the words are numbered, and the words
            # read the picture in the crossing.
            axes = {"picture": axis, "words": positions_axis(inputs["words"].shape[1])}
            stacks = {"word_encoder": "words", "picture_encoder": "picture",
                      "encoder": "picture", "": "words"}  # fmt: skip
            return Inputs("image", axes, stacks, inputs)
        kind = "image" if axis["kind"] == "image" else "module"
        return Inputs(kind, {"tokens": axis}, {"": "tokens"}, inputs)


def loaded(folder: Path) -> Loaded:
    """The model of a run.

    Raises:
        BadInput, BadFile: as `headwise.tasks.runs.load`.
    """
    read = load(folder)
    read.model.is_causal = read.task.causal  # type: ignore[assignment]  # where checks look for it
    about = f"{read.task.title} ({read.task.metric} {read.about['test']['value']:.4g} on test)"
    return Loaded(
        f"{read.task.name}, {read.design.label}",
        str(folder),
        read.model,
        "module",
        ExamplePreparer(read),
        None,
        str(read.about["licence"]),
        about,
    )


def named_axis(names: Sequence[str]) -> AxisValues:
    """An axis of tokens that have names, but are not parts of one text: (L,) names."""
    starts, place = [], 0
    for name in names:
        starts.append(place)
        place += len(name) + 1
    return {
        "kind": "text",
        "tokens": list(names),
        "special": [0] * len(names),
        "real": [1] * len(names),
        "text": " ".join(names),
        "starts": starts,
        "ends": [start + len(name) for start, name in zip(starts, names, strict=True)],
        "words": list(range(len(names))),
    }


def _picture(inputs: dict[str, Tensor], tokens: int) -> AxisValues | None:
    """The axis of a picture's patches, where a picture is what goes in."""
    grid = round(tokens**0.5)
    images = inputs.get("images")
    if images is None or images.ndim != 4 or grid * grid != tokens:
        return None
    pillow = require("PIL.Image", extra="models", purpose="showing pictures")
    pixels = (images[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    picture = pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    # A picture of 8 × 8 pixels would be a speck on the page.
    scale = max(1, 224 // picture.width)
    picture = picture.resize((picture.width * scale, picture.height * scale), pillow.NEAREST)
    return image_axis(picture, (grid, grid), ())
