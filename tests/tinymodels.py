"""Tiny real Hugging Face directories, written by transformers and tokenizers themselves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "maya", "placed", "the", "book", "she", "left", ","]


def save_tokenizer(directory: Path, *, wrap: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if wrap:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    # As sentence-transformers ships it: cutting and padding that must not act.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        eos_token="[SEP]",
    ).save_pretrained(str(directory))


def _save(model: torch.nn.Module, directory: Path) -> torch.nn.Module:
    transformers.utils.logging.disable_progress_bar()
    try:
        model.save_pretrained(str(directory))  # type: ignore[operator]
    finally:
        transformers.utils.logging.enable_progress_bar()
    return model.eval()


def save_llama(directory: Path) -> torch.nn.Module:
    save_tokenizer(directory, wrap=False)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=13,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _save(transformers.LlamaForCausalLM(config), directory)


def save_bert(directory: Path) -> torch.nn.Module:
    save_tokenizer(directory, wrap=True)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=13,
    )
    # Saved with its masked-language head, so the pooler that the bare model adds is missing.
    return _save(transformers.BertForMaskedLM(config), directory)


def save_t5(directory: Path) -> torch.nn.Module:
    save_tokenizer(directory, wrap=True)
    config = transformers.T5Config(
        vocab_size=len(WORDS),
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        eos_token_id=2,
    )
    return _save(transformers.T5ForConditionalGeneration(config), directory)


def save_vit(directory: Path) -> torch.nn.Module:
    config = transformers.ViTConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
    )
    stated = {
        "do_resize": True,
        "size": {"height": 32, "width": 32},
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "resample": 2,
    }
    model = _save(transformers.ViTModel(config), directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(stated))
    return model


def save_whisper(directory: Path) -> torch.nn.Module:
    save_tokenizer(directory, wrap=False)
    config = transformers.WhisperConfig(
        vocab_size=len(WORDS),
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = _save(transformers.WhisperForConditionalGeneration(config), directory)
    transformers.WhisperFeatureExtractor().save_pretrained(str(directory))
    return model
