"""The assertions for pytest: sound models pass, a broken one fails with its finding, short."""

import pytest
import torch
from torch import nn

from headwise.checks import Signature, torch_sdpa
from headwise.masks import everything
from headwise.pytest_plugin import (
    assert_batch_invariant,
    assert_causal,
    assert_heads_split_right,
    assert_matches_reference,
)
from toys import Toy

pytest_plugins = ["pytester"]

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Leaky(Toy):
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, mask=everything() if number == 1 else self.causal())
        return x

    @staticmethod
    def causal():
        from headwise.masks import causal

        return causal()


def test_a_sound_model_passes(headwise_model):
    torch.manual_seed(0)
    model = headwise_model(Toy())
    assert_causal(model, IDS)
    assert_batch_invariant(model, IDS)


def test_a_leak_fails_and_names_the_layer():
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match=r"future leak.*\n.*first seen in layers\.1, layer 1"):
        assert_causal(Leaky(), IDS)


def test_what_cannot_run_is_no_pass():
    class Silent(nn.Module):
        def forward(self, x):
            return "nothing"

    with pytest.raises(pytest.fail.Exception, match="could not run"):
        assert_causal(Silent(), IDS)


def test_the_fixture_gives_the_modes_back(pytester):
    pytester.makepyfile(
        """
        import torch

        model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()

        def test_one(headwise_model):
            assert not headwise_model(model)[0].training

        def test_two():
            assert model.training and model[0].training
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_attention_functions():
    signature = torch_sdpa()
    assert isinstance(signature, Signature)
    function = torch.nn.functional.scaled_dot_product_attention
    assert_heads_split_right(function, signature)
    assert_matches_reference(function, signature)

    def twice(query, key, value, *args, **options):
        return function(query * query.shape[-1] ** -0.5, key, value, *args, **options)

    with pytest.raises(AssertionError, match="scale-twice"):
        assert_matches_reference(twice, signature)
