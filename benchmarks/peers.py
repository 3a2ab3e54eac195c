"""Other libraries' attention on the CPU, each optional: what is not installed is left out by name.

A peer gives a function of no arguments that computes attention on given tensors and returns a
torch tensor, or raises `Missing` with the reason why it can't.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]


class Missing(Exception):
    """Why a peer does not take part."""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"{name} is not installed (make bench-peers installs it)") from error


def flex(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """torch's flex_attention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    blocks = None
    if is_causal:
        sizes = (None, None, query.shape[2], key.shape[2])
        blocks = create_block_mask(lambda b, h, i, j: i >= j, *sizes, device="cpu")
    grouped = query.shape[1] != key.shape[1]
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=blocks, enable_gqa=grouped)


def openvino(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """OpenVINO's scaled dot-product attention, compiled for the CPU with our number of threads."""
    ov = _import("openvino")
    ops = _import("openvino.opset13")
    if query.dtype != torch.float32:
        raise Missing("its Python interface takes no bfloat16 arrays")
    if query.shape[1] != key.shape[1]:
        raise Missing("grouped heads need repeated keys")
    inputs = [ops.parameter(list(t.shape), ov.Type.f32) for t in (query, key, value)]
    node = ops.scaled_dot_product_attention(*inputs, causal=is_causal)
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.Core().compile_model(ov.Model([node], inputs), "CPU", options)
    request = request.create_infer_request()
    for place, tensor in enumerate((query, key, value)):
        request.set_input_tensor(place, ov.Tensor(tensor.numpy(), shared_memory=True))

    def run() -> Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor().data)

    return run


def onnxruntime(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """onnxruntime's Attention (opset 23), graph optimised, our number of threads."""
    ort = _import("onnxruntime")
    onnx = _import("onnx")
    if query.dtype != torch.float32:
        raise Missing("its CPU kernel takes float32")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    names = ("query", "key", "value")
    graph = helper.make_graph(
        [helper.make_node("Attention", list(names), ["output"], is_causal=int(is_causal))],
        "attention",
        [helper.make_tensor_value_info(n, kind, list(t.shape))
         for n, t in zip(names, (query, key, value), strict=True)],
        [helper.make_tensor_value_info("output", kind, list(query.shape))],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    given = {n: t.numpy() for n, t in zip(names, (query, key, value), strict=True)}
    return lambda: torch.from_numpy(session.run(["output"], given)[0])


def jax(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Run:
    """jax.nn.dot_product_attention, compiled; its own layout (batch, length, heads, dim)."""
    jax = _import("jax")
    layout = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    arrays = [jax.numpy.from_dlpack(t) for t in layout]
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=is_causal))
    return lambda: torch.from_dlpack(run(*arrays).block_until_ready()).transpose(1, 2)


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Run]] = {
    "flex": flex,
    "OpenVINO": openvino,
    "onnxruntime": onnxruntime,
    "JAX": jax,
}


def prepare(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, wanted: Tensor
) -> tuple[dict[str, Run], dict[str, str]]:
    """(peers that give the right answer, by name; the reasons of the others)."""
    runs: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    room = 32 * torch.finfo(query.dtype).eps * float(wanted.abs().max())
    for name, make in PEERS.items():
        try:
            run = make(query, key, value, is_causal)
            off = float((run().double() - wanted.double()).abs().max())
        except Missing as error:
            reasons[name] = str(error)
        except Exception as error:  # a stranger's library: it takes part, or says why not
            reasons[name] = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0][:120]}"
        else:
            if off <= room:
                runs[name] = run
            else:
                reasons[name] = f"its answer is off by {off:.2g}"
    return runs, reasons


def x_transformers_layer(mine: Any, x: Tensor) -> Run:
    """x-transformers' Attention with the weights of a MultiHeadAttention without biases."""
    module = _import("x_transformers.x_transformers")
    width, heads = x.shape[-1], mine.num_heads
    layer = module.Attention(dim=width, heads=heads, dim_head=width // heads, flash=True).eval()
    with torch.no_grad():
        for own, its in (("q_proj", "to_q"), ("k_proj", "to_k"), ("v_proj", "to_v"),
                         ("out_proj", "to_out")):  # fmt: skip
            getattr(layer, its).weight.copy_(getattr(mine, own).weight)
    return lambda: layer(x)
