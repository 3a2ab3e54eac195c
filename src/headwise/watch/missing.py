"""What a watch could not catch: attention-looking modules without a call, each with the reason."""

from __future__ import annotations

import inspect
import re

from torch import nn

from headwise.watch.session import Watch

NAME = re.compile(r"attention|attn|multihead|mha\b", re.IGNORECASE)
# Sets of submodules or weights that are queries, keys and values.
PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
    ("qkv",),
    ("to_qkv",),
    ("c_attn",),
    ("Wqkv",),
    ("qkv_proj",),
    ("in_proj_weight", "out_proj"),
    ("query_key_value",),
)


def attention_paths(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like attention by class name or by their projections, innermost only."""
    looks = {path: module for path, module in model.named_modules() if _looks(module)}
    return {
        path: module
        for path, module in looks.items()
        if not any(other != path and _inside(other, path) for other in looks)
    }


def _looks(module: nn.Module) -> bool:
    own = {name for name, _ in module.named_children()}
    own |= {name for name, value in module.named_parameters(recurse=False) if value is not None}
    if any(set(names) <= own for names in PROJECTIONS):
        return True
    if not NAME.search(type(module).__name__):
        return False
    return next(module.parameters(), None) is not None and bool(own)


def _inside(path: str, ancestor: str) -> bool:
    return ancestor == "" or path.startswith(ancestor + ".")


def _related(path: str, other: str) -> bool:
    return path == other or _inside(path, other) or _inside(other, path)


def not_caught(watch: Watch, candidates: dict[str, nn.Module]) -> list[str]:
    """One line each: a module and why no call of it, or not each of its calls, was recorded."""
    lines = []
    for (path, reason), times in watch.unread.items():
        lines.append(f"{_name(watch, path)}: {times} calls seen but not recorded: {reason}")
    told = {path for path, _ in watch.unread}
    sealed = _sealed(watch.model)
    lines += [f"{_name(watch, path)}: {reason}" for path, reason in sealed.items()]
    ran_in = {path for path in watch.ran}
    reasons: dict[str, list[str]] = {}
    for path, module in candidates.items():
        if path in told or any(_covered(path, done) for done in watch.caught):
            continue
        if any(path == box or _inside(path, box) for box in sealed):
            continue
        ran = any(path == done or _inside(done, path) for done in ran_in)
        reason = _why(module) if ran else "it did not run during the watch"
        reasons.setdefault(f"{type(module).__name__}\0{reason}", []).append(path)
    for key, paths in reasons.items():
        kind, reason = key.split("\0")
        lines.append(f"{_several(paths)} ({kind}): {reason}")
    return lines


def _covered(path: str, caught: str) -> bool:
    """A call counted for the module itself or for a part of it."""
    return path == caught or _inside(caught, path)


def _name(watch: Watch, path: str) -> str:
    module = dict(watch.model.named_modules()).get(path)
    return f"{path or 'the model'} ({type(module).__name__})"


def _several(paths: list[str]) -> str:
    shown = [path or "the model" for path in paths[:3]]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(shown) + more


def _sealed(model: nn.Module) -> dict[str, str]:
    """Outermost modules whose inside runs where no watch can look."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(path != box and _inside(path, box) for box in found):
            continue
        reason = _seal(module)
        if reason:
            found[path] = reason
    return found


def _seal(module: nn.Module) -> str:
    import torch

    if hasattr(module, "_orig_mod") and type(module).__name__ == "OptimizedModule":
        return "compiled by torch.compile; watch the module it was made from (._orig_mod)"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled in place by module.compile(); watch it before compiling"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript runs outside Python; watch the module it was made from"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return (
            f"DataParallel runs copies in {len(module.device_ids)} other threads; watch its .module"
        )
    return ""


def _why(module: nn.Module) -> str:
    tried = (
        "it ran, but called neither headwise.attention, F.scaled_dot_product_attention, "
        "nn.MultiheadAttention nor a Hugging Face attention function"
    )
    try:
        source = inspect.getsource(type(module))
    except (OSError, TypeError):
        return tried
    if "softmax" in source:
        return f"{tried}: its class computes the softmax by hand"
    return tried
