"""Subject: a model, one example of its input, and every way to run it that a check needs."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import declared, outputs, paths
from headwise.checks.finding import NotRunnable, gap
from headwise.checks.outputs import rows_of
from headwise.checks.prepare import batch_first_of, default_inputs, pad_id, special_ids
from headwise.checks.streams import Stream, arguments, find, parameters, two_parts
from headwise.errors import HeadwiseError

# A float64 copy of a model larger than this is not made.
LARGEST_COPY = 4 << 30


@dataclass(eq=False)
class Subject:
    """What is checked. Make one with `Subject.of`.

    streams: the sequences that the model reads, the one that its outputs follow first. args,
    kwargs: the other arguments of a call, one example. causal: whether the first stream is, or None
    where nothing says it, and `says`: where it is written. paths: ways to compute attention.
    """

    model: nn.Module
    name: str
    streams: list[Stream]
    args: list[Any]
    kwargs: dict[str, Any]
    causal: bool | None
    says: str
    padding_side: str | None = None
    pad_token_id: int = 0
    batch_first: bool = True
    vocabulary: int = 0
    special: frozenset[int] = frozenset()
    paths: list[str] = field(default_factory=lambda: [paths.OWN])
    documents: Tensor | None = None
    note: str = ""
    _double: Subject | None = None
    _steady: str | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        inputs: Any = None,
        *,
        causal: bool | None = None,
        padding_side: str | None = None,
        pad_token_id: int | None = None,
        batch_first: bool | None = None,
        documents: Tensor | None = None,
        name: str | None = None,
    ) -> Subject:
        """Read from the model what it ought to be; options say what it does not.

        Args:
            model: an nn.Module, or what `headwise.models.load` returned.
            inputs: arguments of one call: a tensor, a tuple, keywords, or `loaded.prepare(…)`; None
                makes random ones where the model's config says what they are.
            causal: whether an output may depend on later tokens; read from the model when None.
            padding_side: "left", "right" or "both": the side that must work.
            pad_token_id: the id that padding is made of; read from the model's config when None.
            batch_first: False for (tokens, batch, width); read from torch's own modules when None.
            documents: (L,) int, the document of each token of a packed row.

        Raises:
            NotRunnable: no input, or none that has tokens.
        """
        kind = getattr(model, "kind", None) if hasattr(model, "model") else None
        loaded, module = (model, model.model) if kind is not None else (None, model)
        if not isinstance(module, nn.Module):
            raise NotRunnable(f"wanted a torch.nn.Module, got {type(module).__name__}")
        if padding_side not in (None, "left", "right", "both"):
            raise ValueError(f"padding_side={padding_side!r}; wanted 'left', 'right' or 'both'")
        if inputs is None:
            inputs = default_inputs(module, loaded)
        args, kwargs = arguments(module, inputs)
        config = getattr(module, "config", None)
        cross = two_parts(module) or "tgt" in kwargs
        if batch_first is None:
            batch_first = batch_first_of(module)
        streams = find(module, args, kwargs, batch_first=batch_first, cross=cross)
        said, says = declared.causal(module, kind, kwargs)
        if causal is not None:
            said, says = causal, f"causal={causal} was given"
        side = padding_side
        if side is None and loaded is not None and kind == "causal":
            side = "both"
        subject = cls(
            module,
            name or getattr(loaded, "name", None) or type(module).__name__,
            streams,
            args,
            kwargs,
            said,
            says,
            side,
            pad_id(config, pad_token_id),
            batch_first,
            special=special_ids(config),
            paths=paths.paths_of(module),
            documents=documents,
        )
        subject._read_documents()
        subject._read_vocabulary()
        return subject

    # --- what it ought to be ---------------------------------------------------------------------

    @property
    def main(self) -> Stream:
        """The stream that the outputs follow."""
        return self.streams[0]

    @property
    def dtype(self) -> torch.dtype:
        kinds = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(kinds, torch.float32)

    @property
    def depth(self) -> int:
        """Layers, as far as rounding is concerned: modules that look like attention, at least 1."""
        from headwise.watch.missing import attention_paths

        return max(1, len(attention_paths(self.model)))

    @property
    def width(self) -> int:
        """The longest sum of one product: the widest matrix of the model but its vocabulary."""
        widths = [p.shape[-1] for p in self.model.parameters() if p.ndim == 2]
        return max(widths, default=1)

    def layer_masks(self, length: int) -> list[Tensor] | None:
        """What each layer of the main stream may see, (L, L) bool; None where nothing says it.

        One mask stands for all layers where they are alike.
        """
        given = declared.mask_given(self.main, self.kwargs, length)
        if self.causal is None and given is None and self.documents is None:
            return None
        sizes = declared.windows(self.model)
        masks = []
        for window in sizes or [None]:
            seen = declared.one_layer(
                length, is_causal=self.causal, window=window, documents=self.documents
            )
            masks.append(seen if given is None else seen & given)
        return masks

    def declared(self, length: int) -> Tensor | None:
        """(L, L) bool: which inputs may move which outputs, through all layers."""
        masks = self.layer_masks(length)
        return None if masks is None else declared.reach(masks)

    def takes(self, name: str) -> bool:
        """Whether forward has an argument of this name."""
        return name in parameters(self.model)[0]

    def tokens(self, stream: Stream | None = None, length: int | None = None) -> Tensor:
        """One example of a stream, (1, L) or (1, L, F), cut to `length`."""
        stream = stream or self.main
        return stream.values if length is None or stream.whole else stream.values[:, :length]

    # --- changing inputs -------------------------------------------------------------------------

    def fresh(self, tokens: Tensor, seed: int) -> Tensor:
        """Other tokens of the same shape: other ordinary ids at every place, or other features."""
        generator = torch.Generator().manual_seed(seed)
        if tokens.is_floating_point():
            noise = torch.randn(tokens.shape, generator=generator, dtype=torch.float64)
            scale = float(tokens.detach().float().std()) if tokens.numel() > 1 else 1.0
            return (noise * (scale or 1.0)).to(tokens)
        ordinary = [i for i in range(self.vocabulary) if i not in self.special]
        if len(ordinary) < 2:
            raise NotRunnable(f"the vocabulary has {self.vocabulary} tokens; none can be replaced")
        pool = torch.tensor(ordinary)
        picked = torch.randint(len(ordinary), tokens.shape, generator=generator)
        new = pool[picked].to(tokens)
        after = pool[(picked + 1) % len(ordinary)].to(tokens)
        return torch.where(new == tokens, after, new)

    def replaced(self, tokens: Tensor, place: int, seed: int = 0) -> Tensor:
        """`tokens` with another token at `place`."""
        changed = tokens.clone()
        changed[:, place] = self.fresh(tokens, seed)[:, place]
        return changed

    # --- running ---------------------------------------------------------------------------------

    def run(
        self,
        tokens: Tensor,
        *,
        stream: Stream | None = None,
        real: Tensor | None = None,
        positions: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
        grad: bool = False,
        **more: Any,
    ) -> Tensor:
        """The outputs for these tokens: (B, L, F), or (B, 1, F) where the model pools.

        Args:
            tokens: (B, L) or (B, L, F) of `stream` (default: the main one), batch first.
            real: (B, L) bool, False at padding; given to the model by the name that it takes.
            positions: (B, L) int, given where the model takes them.
            embed: maps the tokens' embeddings (B, L, width) to others.

        Raises:
            NotRunnable: the model raised, or its output is no tensor of this batch.
        """
        output = self.call(tokens, stream, real, positions, embed, grad, more)
        return rows_of(output, tokens.shape[0], self.batch_first)

    def call(
        self,
        tokens: Tensor,
        stream: Stream | None = None,
        real: Tensor | None = None,
        positions: Tensor | None = None,
        embed: Callable[[Tensor], Tensor] | None = None,
        grad: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> Any:
        """The model's own output; see `run`."""
        given = tokens
        if embed is not None and tokens.is_floating_point():
            given = embed(tokens)
        args, kwargs = self.arguments(given, stream, real, positions, more)
        hooked: contextlib.AbstractContextManager = contextlib.nullcontext()
        if embed is not None and not tokens.is_floating_point():
            hooked = outputs.embedding(self.model, tokens, embed)
        try:
            with torch.set_grad_enabled(grad), hooked, warnings.catch_warnings():
                # A model is run dozens of times here; what it warns of, its own runs tell once.
                warnings.simplefilter("ignore")
                return self.model(*args, **kwargs)
        except HeadwiseError:
            raise
        except Exception as error:
            reason = (str(error).strip() or "no message").splitlines()[0][:200]
            raise NotRunnable(
                f"the model raised {type(error).__name__} on inputs of shape "
                f"{list(tokens.shape)}: {reason}"
            ) from error

    def arguments(
        self,
        tokens: Tensor,
        stream: Stream | None = None,
        real: Tensor | None = None,
        positions: Tensor | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """(positional, keyword) arguments of the call on these tokens; see `run`."""
        stream = stream or self.main
        batch = tokens.shape[0]
        kwargs = {name: self._spread(name, value, batch, stream, tokens)
                  for name, value in self.kwargs.items()}  # fmt: skip
        args = [self._spread(place, value, batch, stream, tokens)
                for place, value in enumerate(self.args)]  # fmt: skip
        if not self.batch_first and not stream.whole:
            tokens = tokens.transpose(0, 1)
        if isinstance(stream.slot, int):
            args[stream.slot] = tokens
        else:
            kwargs[stream.slot] = tokens
        if stream.padding is not None:
            kwargs.pop(stream.padding, None)
            if real is not None:
                kwargs[stream.padding] = self._padding(stream, real.to(tokens.device))
        if stream.positions is not None:
            kwargs.pop(stream.positions, None)
            if positions is not None:
                kwargs[stream.positions] = positions
        kwargs.update(more or {})
        return args, kwargs

    def _padding(self, stream: Stream, real: Tensor) -> Tensor:
        """The padding mask as the model takes it; torch wants the dtype of the square mask."""
        if not stream.hides:
            return real.long()
        square = self.kwargs.get(stream.square or "")
        if isinstance(square, Tensor) and square.is_floating_point():
            return torch.zeros(real.shape).to(square).masked_fill(~real, -torch.inf)
        return ~real

    def _spread(
        self, name: str | int, value: Any, batch: int, stream: Stream, tokens: Tensor
    ) -> Any:
        """Another argument for this batch and length."""
        length = tokens.shape[1]
        if name == stream.square:
            return value[..., :length, :length]
        if name == stream.documents and isinstance(value, Tensor):
            ids = value if value.ndim == 1 else value[:1].expand(batch, -1)
            return ids[..., :length]
        if isinstance(value, Tensor):
            own = next((s for s in self.streams if s.slot == name), None)
            if own is not None:
                value = own.values.expand(batch, *own.values.shape[1:])
                return value if self.batch_first or own.whole else value.transpose(0, 1)
            beside = next((s for s in self.streams if s.padding == name), None)
            if beside is not None and value.ndim == 2:  # as long as its stream, which was cut
                return value[:1, : beside.length].expand(batch, -1)
            if value.ndim and not (value.ndim == 2 and "mask" in str(name)):
                axis = 0 if self.batch_first or value.ndim != 3 else 1
                one = value.narrow(axis, 0, min(1, value.shape[axis]))
                sizes = [-1] * value.ndim
                sizes[axis] = batch
                return one.expand(sizes)
            return value
        if hasattr(value, "last_hidden_state"):  # what an encoder gave, for a decoder
            states = value.last_hidden_state
            return type(value)(last_hidden_state=states[:1].expand(batch, -1, -1))
        return value

    def want_rows(self, found: Tensor, tokens: Tensor) -> None:
        """Raise NotRunnable where the outputs are not one row a token."""
        if found.shape[1] != tokens.shape[1]:
            raise NotRunnable(
                f"the model gives {found.shape[1]} output rows for {tokens.shape[1]} tokens; "
                "wanted one for each (pass the part of the model that gives them)"
            )

    # --- how it runs -----------------------------------------------------------------------------

    def on(self, path: str | None) -> contextlib.AbstractContextManager[None]:
        """Inside the block the model computes on this path."""
        return paths.on_path(self.model, path)

    @contextlib.contextmanager
    def in_eval(self) -> Iterator[None]:
        """Inside the block every module is in eval mode, as `model.eval()` sets it."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def want_steady(self) -> None:
        """Raise NotRunnable where two runs of one input differ: nothing could then be compared."""
        if self._steady is None:
            tokens = self.tokens()
            one, two = self.run(tokens), self.run(tokens)
            worst = gap(one, two)
            self._steady = (
                f"two runs of the same input differ by {worst:.3g} in eval mode, so no comparison "
                "means anything; the eval check says which module draws random numbers"
                if worst
                else ""
            )
        if self._steady:
            raise NotRunnable(self._steady)

    def double(self) -> Subject | None:
        """The same in float64, made once; None where the copy would be larger than 4 GiB."""
        if self.dtype == torch.float64:
            return None
        if self._double is None:
            self._double = self.copied(torch.float64)
        return self._double

    def copied(self, dtype: torch.dtype) -> Subject | None:
        """A copy in this dtype; None where it would be larger than 4 GiB, or can't be made."""
        count = sum(p.numel() for p in self.model.parameters())
        if torch.finfo(dtype).bits // 8 * count > LARGEST_COPY:
            return None
        try:
            model = copy.deepcopy(self.model).to(dtype)
        except Exception:  # a model that cannot be copied has no second opinion
            return None

        def lift(value: Any) -> Any:
            return outputs.lift(value, dtype)

        return replace(
            self,
            model=model,
            streams=[replace(s, values=lift(s.values)) for s in self.streams],
            args=[lift(value) for value in self.args],
            kwargs={name: lift(value) for name, value in self.kwargs.items()},
            _double=None,
            _steady=None,
        )

    # --- reading the rest ------------------------------------------------------------------------

    def _read_documents(self) -> None:
        slot = self.main.documents
        if self.documents is None and slot is not None:
            ids = self.kwargs[slot]
            self.documents = (ids if ids.ndim == 1 else ids[0])[: self.main.length].cpu()
        elif self.documents is None and self.main.positions in self.kwargs:
            steps = self.kwargs[self.main.positions]
            steps = (steps if steps.ndim == 1 else steps[0])[: self.main.length].cpu()
            if bool((steps.diff() < 0).any()):  # positions start again: packed documents
                ids = (steps.diff(prepend=steps[:1] - 1) != 1).cumsum(0)
                self.documents = ids

    def _read_vocabulary(self) -> None:
        if self.main.kind != "ids":
            return
        with self.in_eval(), outputs.tables(self.model, self.main.values) as sizes:
            self.call(self.main.values)
        limit = getattr(getattr(self.model, "config", None), "vocab_size", None)
        if isinstance(limit, int):
            sizes.append(limit)
        self.vocabulary = min(sizes) if sizes else int(self.main.values.max()) + 1
