"""The public surface, pinned: adding a name is a decision, losing one breaks somebody."""

import inspect

import headwise

NAMES = [
    "ALiBi",
    "AttentionCall",
    "AttentionOptions",
    "HeadStatistics",
    "HeadwiseError",
    "KVCache",
    "Mask",
    "MultiHeadAttention",
    "QuantizedKVCache",
    "Record",
    "RelativeBias",
    "RollingKVCache",
    "Rotary",
    "accelerated",
    "attention",
    "causal",
    "choose",
    "documents",
    "everything",
    "explain",
    "head_statistics",
    "hide",
    "keep",
    "merge",
    "padding",
    "prefix",
    "watch",
    "window",
]


def test_public_names():
    assert sorted(headwise.__all__) == NAMES
    assert all(hasattr(headwise, name) for name in NAMES)


def test_each_is_documented():
    for name in NAMES:
        assert inspect.getdoc(getattr(headwise, name)), name


def test_functions_are_not_shadowed_by_the_modules_of_the_same_name():
    import headwise.attention
    import headwise.watch

    assert callable(headwise.attention) and callable(headwise.watch)


def test_the_layer_takes_ten_arguments_at_most():
    arguments = inspect.signature(headwise.MultiHeadAttention.__init__).parameters
    assert len(arguments) - 1 <= 10, list(arguments)
