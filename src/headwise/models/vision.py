"""A picture to a ViT's input, and the axis of its patches."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise._extras import require
from headwise.errors import BadFile, BadInput
from headwise.models.loaded import AxisValues, Inputs

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes a tensor, as Hugging Face's preprocessor_config.json states it.

    `size` is (height, width), or one number for the shorter edge; `crop` (height, width) is cut
    from the centre, or None. `resample` is PIL's number (2 bilinear, 3 bicubic).
    """

    size: tuple[int, int] | int | None
    crop: tuple[int, int] | None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    resample: int = 3
    rescale: float = 1 / 255

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Preprocessing:
        """From a parsed preprocessor_config.json.

        Raises:
            BadFile: a size is in a form that is not known.
        """

        def pair(value: Any) -> tuple[int, int]:
            if isinstance(value, int):
                return value, value
            if isinstance(value, Mapping) and {"height", "width"} <= set(value):
                return int(value["height"]), int(value["width"])
            raise BadFile(f"{where}: size {value!r} is not known; wanted height and width")

        size: tuple[int, int] | int | None = None
        if config.get("do_resize", True) and config.get("size") is not None:
            stated = config["size"]
            if isinstance(stated, Mapping) and "shortest_edge" in stated:
                size = int(stated["shortest_edge"])
            else:
                size = pair(stated)
        crop = None
        if config.get("do_center_crop") and config.get("crop_size") is not None:
            crop = pair(config["crop_size"])
        normalize = config.get("do_normalize", True)
        return cls(
            size=size,
            crop=crop,
            mean=tuple(config.get("image_mean") or IMAGENET_MEAN) if normalize else (0.0,) * 3,
            std=tuple(config.get("image_std") or IMAGENET_STD) if normalize else (1.0,) * 3,
            resample=int(config.get("resample", 3)),
            rescale=float(config.get("rescale_factor", 1 / 255)),
        )

    def picture(self, path: str | Path) -> Any:
        """The file as a PIL picture in RGB, at the model's input size. Transparency goes on white.

        Raises:
            BadInput: the file cannot be read as a picture.
        """
        pillow = require("PIL.Image", extra="models", purpose="reading pictures")
        ops = require("PIL.ImageOps", extra="models", purpose="reading pictures")
        try:
            with open(path, "rb") as file, pillow.open(file) as opened:
                # Cameras store which way is up beside the pixels.
                picture = ops.exif_transpose(opened).convert("RGBA")
        except pillow.UnidentifiedImageError:
            raise BadInput(
                f"{path}: not a picture that can be read (PNG, JPEG, WebP can)"
            ) from None
        except pillow.DecompressionBombError as error:
            raise BadInput(f"{path}: the picture is too large ({error})") from None
        except (OSError, SyntaxError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BadInput(f"cannot read {path} as a picture: {reason.lower()}") from None
        white = pillow.new("RGBA", picture.size, "white")
        picture = pillow.alpha_composite(white, picture).convert("RGB")
        width, height = picture.size
        if isinstance(self.size, int):
            scale = self.size / min(width, height)
            target = (max(1, round(width * scale)), max(1, round(height * scale)))
            picture = picture.resize(target, self.resample)
        elif self.size is not None:
            picture = picture.resize((self.size[1], self.size[0]), self.resample)
        if self.crop is not None:
            # PIL fills with black where the crop is larger than the picture.
            left, top = (picture.width - self.crop[1]) // 2, (picture.height - self.crop[0]) // 2
            picture = picture.crop((left, top, left + self.crop[1], top + self.crop[0]))
        return picture

    def tensor(self, picture: Any) -> torch.Tensor:
        """(1, 3, height, width) float32, rescaled and normalised."""
        pixels: Any = np.asarray(picture, dtype=np.float32) * np.float32(self.rescale)
        pixels = (pixels - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]


def image_axis(picture: Any, grid: tuple[int, int], before: Sequence[str]) -> AxisValues:
    """The `axis` record's values for a picture's patches, row by row, after the `before` tokens.

    The picture travels as a PNG data URI at the model's input size, so that the page needs no file.
    """
    rows, columns = grid
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    patches = [f"row {row}, column {column}" for row in range(rows) for column in range(columns)]
    count = len(before) + len(patches)
    return {
        "kind": "image",
        "tokens": [*before, *patches],
        "special": [1] * len(before) + [0] * len(patches),
        "real": [1] * count,
        "image": "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii"),
        "grid": [rows, columns],
        "size": [picture.width, picture.height],
    }


class VisionPreparer:
    """A picture for a plain ViT: class and register tokens first, then the patches row by row."""

    takes: tuple[str, ...] = ("image",)

    def __init__(self, preprocessing: Preprocessing, name: str):
        self.preprocessing = preprocessing
        self.name = name

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        path = given.get("image")
        if path is None:
            raise BadInput(f"{self.name} looks at a picture: give --image FILE (PNG, JPEG, WebP)")
        config: Any = model.config
        picture = self.preprocessing.picture(path)
        patch = config.patch_size
        high, wide = (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1]))
        grid = (picture.height // high, picture.width // wide)
        parameter = next(model.parameters())
        pixels = self.preprocessing.tensor(picture).to(parameter.device, parameter.dtype)
        with torch.inference_mode():
            embeddings = getattr(model, "embeddings", None)
            tokens = model(pixels)[0] if embeddings is None else embeddings(pixels)
        tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        extra = tokens.shape[1] - grid[0] * grid[1] if tokens.ndim == 3 else -1
        if extra < 0 or extra > 64:
            raise BadInput(
                f"{self.name}: {grid[0]} × {grid[1]} patches do not fit its tokens of shape "
                f"{list(tokens.shape)}; only plain ViTs are prepared here, use "
                "package.module:factory"
            )
        before = ["[CLS]", *(f"[REG {number}]" for number in range(1, extra))][:extra]
        axis = image_axis(picture, grid, before)
        return Inputs("image", {"image": axis}, {"": "image"}, {"pixel_values": pixels})
