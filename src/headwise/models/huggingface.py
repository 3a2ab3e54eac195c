"""A Hugging Face model, from a directory or by hub id: which class to load, and what its input is.

Never runs code that comes with a model, never unpickles: safetensors only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headwise._extras import require
from headwise.errors import BadFile, UnknownModel
from headwise.models.loaded import Loaded, Preparer
from headwise.models.quiet import first_line, quiet
from headwise.models.seq2seq import Seq2SeqPreparer
from headwise.models.speech import SpeechPreparer
from headwise.models.text import TextPreparer
from headwise.models.vision import Preprocessing, VisionPreparer


def load(source: str, name: str, *, dtype: torch.dtype | None, local: bool) -> Loaded:
    """The model in `source`: a directory (`local`), or a hub id that may be downloaded.

    Raises:
        BadFile: no config.json, no safetensors, weights missing or corrupt, no tokenizer.
        UnknownModel: the hub has no such model or cannot be reached; or the kind is not supported.
    """
    transformers = require("transformers", extra="models", purpose="headwise.models")
    if local:
        _look(Path(source))
    where = {"local_files_only": local, "trust_remote_code": False}
    config = _config(transformers, source, where)
    kind, loader = _kind(transformers, config, name)
    model = _weights(loader, source, dtype, where)
    preparer: Preparer
    if kind == "vision":
        preparer = VisionPreparer(_preprocessing(transformers, source, where), name)
        return Loaded(name, source, model, kind, preparer)
    tokenizer = _tokenizer(transformers, source, where)
    if kind == "speech":
        preparer = SpeechPreparer(tokenizer, name, _features(transformers, source, where))
    elif kind == "encoder-decoder":
        preparer = Seq2SeqPreparer(tokenizer, name)
    else:
        preparer = TextPreparer(tokenizer, name)
    return Loaded(name, source, model, kind, preparer, tokenizer)


def _look(directory: Path) -> None:
    """Say what is wrong with a directory before transformers says it at length."""
    config = directory / "config.json"
    if not config.is_file():
        raise BadFile(
            f"{directory}: no config.json; wanted a Hugging Face model directory (config.json, "
            "model.safetensors, tokenizer.json) or a GGUF file"
        )
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {config}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise BadFile(f"{config}: not JSON ({error})") from None
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise BadFile(f"{config}: no model_type; it is not a transformers configuration")
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(path.name for path in directory.glob("*.bin"))
        pickles += sorted(path.name for path in directory.glob("*.pt"))
        if pickles:
            raise BadFile(
                f"{directory}: weights only as a pickle ({pickles[0]}), which can run code when "
                "read; convert them to safetensors (save_pretrained writes it)"
            )
        raise BadFile(f"{directory}: no weights (*.safetensors)")


def _config(transformers: Any, source: str, where: dict[str, Any]) -> Any:
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(source, **where)
    except OSError as error:
        raise UnknownModel(
            f"{source}: no such directory, and the Hugging Face hub gave no model of that name "
            f"({first_line(error)})"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(
            f"{source}: transformers {transformers.__version__} does not know this configuration "
            f"({first_line(error)}); a model that brings its own code is not run"
        ) from None


def _kind(transformers: Any, config: Any, name: str) -> tuple[str, Any]:
    """(kind, auto class). Text with a causal head is causal; a config says more than a model's
    name."""
    kind, known = type(config), transformers
    if kind in known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING and config.model_type == "whisper":
        return "speech", known.AutoModelForSpeechSeq2Seq
    if config.is_encoder_decoder and kind in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "encoder-decoder", known.AutoModelForSeq2SeqLM
    text = getattr(config, "vocab_size", None)
    if getattr(config, "patch_size", None) and getattr(config, "image_size", None) and not text:
        return "vision", known.AutoModel
    if text and not config.is_encoder_decoder and getattr(config, "num_mel_bins", None) is None:
        heads = ("ForCausalLM", "LMHeadModel")
        stated = any(str(one).endswith(heads) for one in config.architectures or ())
        only = (
            kind in known.MODEL_FOR_CAUSAL_LM_MAPPING
            and kind not in known.MODEL_FOR_MASKED_LM_MAPPING
        )
        if stated or only:
            return "causal", known.AutoModelForCausalLM
        return "encoder", known.AutoModel
    raise UnknownModel(
        f"{name}: a {config.model_type} model is none of the kinds that headwise prepares input "
        "for (causal, encoder, encoder-decoder, ViT, Whisper); give package.module:factory instead"
    )


def _weights(loader: Any, source: str, dtype: torch.dtype | None, where: dict[str, Any]) -> Any:
    safetensors = require("safetensors", extra="models", purpose="headwise.models")
    try:
        with quiet():
            model, found = loader.from_pretrained(
                source,
                dtype="auto" if dtype is None else dtype,
                use_safetensors=True,
                output_loading_info=True,
                **where,
            )
    except safetensors.SafetensorError as error:
        raise BadFile(
            f"{source}: corrupt safetensors file, or cut short ({first_line(error)})"
        ) from None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BadFile(f"{source}: the weights cannot be loaded ({first_line(error)})") from None
    # transformers fills what is missing with random numbers and goes on; an attention map of random
    # weights is worse than none. A pooler alone is harmless: it comes after the last attention.
    missing = sorted(key for key in found["missing_keys"] if "pooler" not in key)
    if missing:
        raise BadFile(
            f"{source}: {len(missing)} weights that the model needs are not in the files, "
            f"e.g. {missing[0]}"
        )
    return model.eval()


def _tokenizer(transformers: Any, source: str, where: dict[str, Any]) -> Any:
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(source, **where)
    # The tokenizers library raises a bare Exception for a corrupt tokenizer.json.
    except Exception as error:
        raise BadFile(f"{source}: no tokenizer that can be loaded ({first_line(error)})") from None


def _preprocessing(transformers: Any, source: str, where: dict[str, Any]) -> Preprocessing:
    # The JSON alone is read: the processor classes want torchvision for the same arithmetic.
    hub = require("transformers.utils", extra="models", purpose="headwise.models")
    try:
        path = hub.cached_file(
            source, "preprocessor_config.json", local_files_only=where["local_files_only"]
        )
        parsed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise BadFile(
            f"{source}: no preprocessor_config.json that can be read ({first_line(error)}); it "
            "says the size, mean and standard deviation that the model expects"
        ) from None
    return Preprocessing.from_config(parsed, f"{source}/preprocessor_config.json")


def _features(transformers: Any, source: str, where: dict[str, Any]) -> Any:
    try:
        with quiet():
            return transformers.WhisperFeatureExtractor.from_pretrained(source, **where)
    except (OSError, ValueError, TypeError) as error:
        raise BadFile(
            f"{source}: no preprocessor_config.json to read ({first_line(error)})"
        ) from None
