"""A person's text, picture or sound becomes tensors and axes; a bad one becomes one clear line."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from headwise import models
from headwise.errors import BadFile, BadInput
from headwise.models.generate import decoded_offsets, greedy
from headwise.models.speech import audio_axis, read_audio
from headwise.models.text import positions_axis, positions_limit, read_text, word_indices
from headwise.models.vision import Preprocessing, image_axis
from tinymodels import save_bert, save_llama, save_t5, save_vit

SENTENCE = "maya placed the book, she left"


# Text


@pytest.mark.parametrize(
    ("text", "spans", "words"),
    [
        ("ab cd", [(0, 1), (1, 2), (2, 5)], [0, 0, 1]),
        ("ab cd", [(-1, -1), (0, 2), (2, 5), (-1, -1)], [-1, 0, 1, -1]),
        ("a, b", [(0, 1), (1, 2), (2, 4)], [0, 1, 2]),
        ("Maya's book", [(0, 4), (4, 6), (6, 11)], [0, 0, 1]),
        ("a\n\nb", [(0, 1), (1, 2), (2, 3), (3, 4)], [0, 1, 2, 3]),
        ("本を読む", [(0, 1), (1, 2), (2, 3), (3, 4)], [0, 1, 2, 3]),
        ("été 3.5", [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)], [0, 0, 1, 2, 3]),
    ],
)
def test_pieces_of_one_word_share_its_index(
    text: str, spans: list[tuple[int, int]], words: list[int]
) -> None:
    assert word_indices(text, [a for a, _ in spans], [b for _, b in spans]) == words


def test_a_text_axis_names_every_token_and_its_place(tmp_path: Path) -> None:
    save_bert(tmp_path)
    loaded = models.load(tmp_path)
    prepared = loaded.prepare(text=SENTENCE)
    axis = prepared.axes["text"]
    assert axis["tokens"] == ["[CLS]", "maya", "placed", "the", "book", ",", "she", "left", "[SEP]"]
    assert axis["special"] == [1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert axis["real"] == [1] * 9
    assert axis["words"] == [-1, 0, 1, 2, 3, 4, 5, 6, -1]
    assert axis["starts"][0] == axis["ends"][-1] == -1
    for token, start, end in zip(axis["tokens"], axis["starts"], axis["ends"], strict=True):
        assert start == -1 or SENTENCE[start:end] == token
    assert prepared.stacks == {"": "text"}
    output = loaded.run(prepared)
    assert output.last_hidden_state.shape == (1, 9, 24)
    assert torch.is_inference(output.last_hidden_state)


def test_a_causal_model_computes_the_last_logits_only_and_keeps_no_cache(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    loaded = models.load(tmp_path)
    prepared = loaded.prepare(text=SENTENCE)
    output = loaded.run(prepared)
    assert output.logits.shape == (1, 1, 11)
    full = model(prepared.kwargs["input_ids"]).logits
    # float32, sums of 24 products of order one: 24 roundings are far below this.
    assert torch.allclose(output.logits[0, 0], full[0, -1], rtol=0, atol=24 * 2**-23 * 8)
    assert getattr(output, "cache", None) is None
    assert getattr(output, "past_key_values", None) is None


def test_nothing_is_cut_and_nothing_is_padded(tmp_path: Path) -> None:
    """The directory's tokenizer.json asks for three tokens and padding to twenty."""
    save_llama(tmp_path)
    loaded = models.load(tmp_path)
    assert loaded.prepare(text=" ".join(["book"] * 13)).kwargs["input_ids"].shape == (1, 13)


@pytest.mark.parametrize("count", [14, 26])
def test_a_text_longer_than_the_positions_says_both_numbers(tmp_path: Path, count: int) -> None:
    save_llama(tmp_path)
    loaded = models.load(tmp_path)
    wanted = rf"the text has {count} tokens and .* has positions for 13: .* at least {count - 13} "
    with pytest.raises(BadInput, match=wanted):
        loaded.prepare(text=" ".join(["book"] * count))


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_text_is_refused(tmp_path: Path, text: str) -> None:
    save_llama(tmp_path)
    with pytest.raises(BadInput, match="the text is empty"):
        models.load(tmp_path).prepare(text=text)


def test_a_model_says_which_input_it_takes(tmp_path: Path) -> None:
    save_llama(tmp_path)
    loaded = models.load(tmp_path)
    with pytest.raises(BadInput, match="is a causal model and takes --text, not --image"):
        loaded.prepare(image="a.png")
    with pytest.raises(BadInput, match="reads text: give --text TEXT or --file FILE"):
        loaded.prepare()


def test_an_encoder_decoder_has_two_axes_and_reads_its_own_answer(tmp_path: Path) -> None:
    save_t5(tmp_path)
    loaded = models.load(tmp_path)
    prepared = loaded.prepare(text=SENTENCE)
    assert prepared.stacks == {"encoder": "source", "decoder": "target"}
    source, target = prepared.axes["source"], prepared.axes["target"]
    assert source["tokens"][1] == "maya"
    ids = prepared.kwargs["decoder_input_ids"][0].tolist()
    assert len(target["tokens"]) == len(ids) and ids[0] == 0 and target["special"][0] == 1
    output = loaded.run(prepared)
    best = output.logits[0].argmax(-1).tolist()
    # Teacher forcing on a greedy answer: the likeliest next token is always the one that follows.
    assert best[: len(ids) - 1] == ids[1:]
    assert prepared.note.startswith("target by the model itself")


def test_positions_of_models_that_count_from_the_padding_or_not_at_all() -> None:
    import transformers

    assert positions_limit(transformers.BertConfig(max_position_embeddings=512)) == 512
    roberta = transformers.RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert positions_limit(roberta) == 512
    assert positions_limit(transformers.GPT2Config(n_positions=77)) == 77
    assert positions_limit(transformers.T5Config()) is None


def test_positions_without_text_are_numbers() -> None:
    axis = positions_axis(12)
    assert axis["text"] == "0 1 2 3 4 5 6 7 8 9 10 11"
    places = zip(axis["tokens"], axis["starts"], axis["ends"], strict=True)
    assert all(axis["text"][start:end] == token for token, start, end in places)


def test_a_text_file_is_utf8_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("été".encode())
    assert read_text(path) == "été"
    path.write_bytes(b"ab\xe9")
    with pytest.raises(BadInput, match=r"not UTF-8 text \(byte 2\)"):
        read_text(path)
    with pytest.raises(BadInput, match=r"cannot read .*gone: no such file"):
        read_text(tmp_path / "gone")


# Pictures


def _decode(uri: str) -> Image.Image:
    head, _, body = uri.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(body)))


def test_a_picture_axis_counts_patches_row_by_row_and_carries_the_picture(tmp_path: Path) -> None:
    save_vit(tmp_path)
    Image.new("RGB", (50, 40), (255, 0, 0)).save(tmp_path / "a.png")
    loaded = models.load(tmp_path)
    prepared = loaded.prepare(image=tmp_path / "a.png")
    axis = prepared.axes["image"]
    assert axis["grid"] == [4, 4] and axis["size"] == [32, 32]
    assert axis["tokens"][:2] == ["[CLS]", "row 0, column 0"]
    assert axis["tokens"][-2:] == ["row 3, column 2", "row 3, column 3"]
    assert axis["special"] == [1] + [0] * 16
    assert _decode(axis["image"]).size == (32, 32)
    # Mean 0.5 and deviation 0.25 are the directory's: red 1 becomes 2, green and blue 0 become -2.
    pixels = prepared.kwargs["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32)
    for channel, value in enumerate((2.0, -2.0, -2.0)):
        assert torch.allclose(pixels[0, channel], torch.tensor(value), rtol=2**-20, atol=0)
    assert loaded.run(prepared).last_hidden_state.shape == (1, 17, 24)


def test_transparency_goes_on_white_and_the_middle_is_kept(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (60, 20), (0, 0, 255, 255))
    picture.paste((0, 0, 0, 0), (20, 0, 40, 20))
    picture.save(tmp_path / "a.png")
    seen = Preprocessing(size=10, crop=(10, 10), resample=0).picture(tmp_path / "a.png")
    assert seen.size == (10, 10)
    assert seen.getcolors() == [(100, (255, 255, 255))]


def test_a_configuration_of_another_form_is_refused() -> None:
    with pytest.raises(BadFile, match=r"size \{'longest_edge': 9\} is not known"):
        Preprocessing.from_config({"size": {"longest_edge": 9}}, "here")
    stated = {"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": 7}
    found = Preprocessing.from_config(stated, "here")
    assert (found.size, found.crop) == (9, (7, 7))


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    save_vit(tmp_path)
    loaded = models.load(tmp_path)
    bad = tmp_path / "bad.png"
    bad.write_text("not a picture")
    with pytest.raises(BadInput, match="not a picture that can be read"):
        loaded.prepare(image=bad)
    Image.new("RGB", (64, 64), (9, 99, 9)).save(bad)
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(BadInput, match=r"bad\.png"):
        loaded.prepare(image=bad)
    with pytest.raises(BadInput, match=r"cannot read .*gone\.png as a picture: no such file"):
        loaded.prepare(image=tmp_path / "gone.png")
    with pytest.raises(BadInput, match="looks at a picture: give --image FILE"):
        loaded.prepare()


def test_a_square_axis_without_extra_tokens() -> None:
    axis = image_axis(Image.new("RGB", (4, 6)), (3, 2), [])
    assert len(axis["tokens"]) == 6 and axis["special"] == [0] * 6 and axis["size"] == [4, 6]


# Sound


def test_sound_is_mixed_down_and_resampled_without_changing_a_tone(tmp_path: Path) -> None:
    seconds, rate, pitch = 0.5, 44_100, 440
    time = np.arange(int(seconds * rate)) / rate
    tone = 0.25 * np.sin(2 * np.pi * pitch * time)
    soundfile.write(tmp_path / "a.wav", np.stack([tone, tone], 1), rate, subtype="FLOAT")
    heard = read_audio(tmp_path / "a.wav", 16_000)
    assert heard.dtype == np.float32 and len(heard) == 8_000
    wanted = 0.25 * np.sin(2 * np.pi * pitch * np.arange(8_000) / 16_000)
    # A whole number of periods, so the spectrum is exact: what is left is float32's rounding.
    assert np.abs(heard - wanted).max() < 16 * 2**-24


def test_a_sound_above_the_new_limit_is_gone_not_folded(tmp_path: Path) -> None:
    time = np.arange(22_050) / 44_100
    soundfile.write(tmp_path / "a.wav", np.sin(2 * np.pi * 12_000 * time), 44_100, subtype="FLOAT")
    assert np.abs(read_audio(tmp_path / "a.wav", 16_000)).max() < 1e-6


def test_an_audio_axis_says_where_the_sound_ends_and_how_loud_it_is() -> None:
    samples = np.zeros(8_000, np.float32)
    samples[4_000:] = -0.5
    axis = audio_axis(samples, window=2.0, tokens=100, rate=16_000)
    assert axis["step"] == 0.02 and axis["seconds"] == 2.0
    assert sum(axis["real"]) == 25 and axis["real"][:25] == [1] * 25
    assert axis["tokens"][10] == "0.20 s"
    assert len(axis["envelope"]) == 100
    assert axis["envelope"][:12] == [0.0] * 12 and axis["envelope"][13:25] == [1.0] * 12
    assert axis["envelope"][25:] == [0.0] * 75


def test_silence_has_a_flat_envelope() -> None:
    axis = audio_axis(np.zeros(10, np.float32), window=30.0, tokens=1500)
    assert axis["envelope"] == [0.0] * 600 and sum(axis["real"]) == 1


@pytest.mark.parametrize("content", ["text", "empty", "none", "nan"])
def test_a_file_that_is_no_sound_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.wav"
    wanted = {
        "text": "not a sound file that can be read",
        "empty": "the sound file holds no samples",
        "none": "cannot read .*: no such file",
        "nan": "NaN or infinite samples",
    }[content]
    if content == "text":
        path.write_text("not sound")
    elif content == "empty":
        soundfile.write(path, np.zeros(0), 16_000)
    elif content == "nan":
        soundfile.write(path, np.full(4, np.nan), 16_000, subtype="FLOAT")
    with pytest.raises(BadInput, match=wanted):
        read_audio(path)


# Greedy decoding


class _Script:
    """A decoder that says its script whatever it is given; the banned token is always likeliest."""

    def __init__(self, script: list[int], banned: int):
        self.script, self.banned, self.steps = script, banned, 0

    def get_encoder(self) -> object:
        return lambda **_: (torch.zeros(1),)

    def forward(
        self, encoder_outputs: object, decoder_input_ids: object, cache: object
    ) -> None: ...

    def __call__(self, **_: object) -> object:
        logits = torch.zeros(1, 1, 9)
        logits[0, 0, self.script[self.steps]] = 1
        logits[0, 0, self.banned] = 2
        self.steps += 1

        class Output(dict):
            pass

        output = Output(cache=None)
        output.logits = logits
        return output


def test_greedy_follows_the_likeliest_allowed_token_until_it_stops() -> None:
    assert greedy(_Script([3, 4, 5, 8], 7), {}, [1], stop=8, limit=9, suppress=[7]) == [3, 4, 5]
    assert greedy(_Script([3, 4, 5, 8], 7), {}, [1], stop=8, limit=2, suppress=[7]) == [3, 4]
    assert greedy(_Script([3, 4, 8], 7), {}, [1], stop=[7, 8], limit=9, suppress_first=[7]) == [3]


def test_tokens_that_share_a_character_get_it_with_the_last() -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: object) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text, places = decoded_offsets(Bytes(), list("aé€".encode()))
    assert text == "aé€"
    assert places == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 2), (2, 3)]
