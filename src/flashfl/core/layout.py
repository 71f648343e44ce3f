"""Where each tensor of a model lies in one flat vector, and which of them may be sparse.

The vector holds the prunable layers first, then the dense ones, then the statistics (BatchNorm's running means and
variances), so a mask is one boolean vector over the first `prunable_size` positions. Fixed tensors are never trained,
averaged or masked: they stay in the model and have no place in the vector.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .errors import ConfigError

Kind = Literal["prunable", "dense", "statistic", "fixed"]
_TURNED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS: tuple[Kind, ...] = get_args(Kind)
Predicate = Callable[[str, nn.Parameter], bool]
Rule = str | Sequence[str] | Predicate


@dataclass(frozen=True)
class Layer:
    """One tensor: its name in the module, its shape, and its place [start, stop) in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    kind: Kind
    turned: bool = False  # the weight of a transposed convolution, whose inputs are the first dimension

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Its place in the flat vector."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, in the order they lie in the flat vector (row-major over each logical shape)."""

    layers: tuple[Layer, ...]

    @staticmethod
    def of(module: nn.Module, prunable: Rule = "auto", fixed: Rule = ()) -> Layout:
        """The layout of `module`; `prunable` and `fixed` say which parameters are of those kinds."""
        params = dict(module.named_parameters())
        frozen = _match(module, fixed, params, "fixed") if fixed else set()
        frozen |= {name for name, p in params.items() if not p.requires_grad}
        trained = {name: p for name, p in params.items() if name not in frozen}
        chosen = _match(module, prunable, trained, "prunable")
        found: dict[Kind, list[tuple[str, tuple[int, ...]]]] = {kind: [] for kind in KINDS}
        for name, p in params.items():
            kind: Kind = "fixed" if name in frozen else "prunable" if name in chosen else "dense"
            if kind != "fixed" and not p.is_floating_point():
                raise ConfigError(
                    f"parameter {name!r} is {p.dtype}: only floating-point parameters can be trained. Make it a buffer."
                )
            found[kind].append((name, tuple(p.shape)))
        for name, b in module.named_buffers():
            if b.is_floating_point() and name.rsplit(".", 1)[-1] in ("running_mean", "running_var"):
                found["statistic"].append((name, tuple(b.shape)))
        turned = {f"{name}.weight".lstrip(".") for name, m in module.named_modules() if isinstance(m, _TURNED)}
        return Layout.build(found, turned)

    @staticmethod
    def build(tensors: Mapping[Kind, Iterable[tuple[str, tuple[int, ...]]]], turned: Collection[str] = ()) -> Layout:
        """A layout of named shapes given by kind; `turned`: those whose inputs are the first dimension."""
        layers, at = [], 0
        for kind in KINDS:
            for name, shape in tensors.get(kind, ()):
                size = int(torch.Size(shape).numel())
                layers.append(Layer(name, tuple(shape), at, at + size, kind, name in turned))
                at += size
        return Layout(tuple(layers))

    def of_kind(self, *kinds: Kind) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    @cached_property
    def prunable(self) -> tuple[Layer, ...]:
        return self.of_kind("prunable")

    @cached_property
    def travelling(self) -> tuple[Layer, ...]:
        """Every layer that has a place in the vector."""
        return self.of_kind("prunable", "dense", "statistic")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """k_l: the number of weights of each prunable layer."""
        return tuple(layer.size for layer in self.prunable)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where each prunable layer begins and ends in the flat vector."""
        return tuple((layer.start, layer.stop) for layer in self.prunable)

    @cached_property
    def prunable_size(self) -> int:
        """K: the number of prunable weights, and the length of a mask."""
        return sum(self.sizes)

    @cached_property
    def trained_size(self) -> int:
        """Prunable and dense weights: what gradients exist for."""
        return self.prunable_size + sum(layer.size for layer in self.of_kind("dense"))

    @cached_property
    def size(self) -> int:
        """The length of the flat vector."""
        return self.trained_size + sum(layer.size for layer in self.of_kind("statistic"))

    @cached_property
    def hash(self) -> str:
        """16 hex digits that two parties compare before they exchange bytes."""
        rows = [[layer.name, list(layer.shape), layer.kind] for layer in self.layers]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The named tensors of a flat vector, as views into it."""
        return {layer.name: vector[layer.span].view(layer.shape) for layer in self.travelling}

    def read(self, module: nn.Module) -> Tensor:
        """The module's tensors as one flat float32 vector on the CPU."""
        held, vector = tensors_of(module), torch.zeros(self.size)
        for name, view in self.views(vector).items():
            view.copy_(held[name].detach())
        return vector

    def write(self, vector: Tensor, module: nn.Module) -> None:
        """Copy a flat vector into the module's tensors."""
        held = tensors_of(module)
        with torch.no_grad():
            for name, view in self.views(vector).items():
                held[name].copy_(view)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those too that a module does not save."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


# How layers call their weight matrices: most of them; attention; recurrent ones (hr: an LSTM's projection).
_MATRIX = re.compile(r"weight|in_proj_weight|[qkv]_proj_weight|weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
_PARAMETRIZED = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.original1?")  # of a weight_norm's two the direction


def _matrices(module: nn.Module) -> tuple[dict[str, nn.Module], str]:
    """Weight matrices in order, each with its layer, and the name of the model's last one.

    Excludes embeddings, output layers tied to them, and parametrized weights (a zero in the parameter need not be a
    zero in the weight, and weight_norm divides by the length of a row). The last matrix may be one of these.
    """
    modules = dict(module.named_modules())
    names = {p: name for name, p in module.named_parameters()}
    owners: dict[str, nn.Module] = {}
    embedded: set[str] = set()
    uses: list[str] = []
    for path, part in modules.items():
        for leaf, p in part.named_parameters(recurse=False):
            found = _PARAMETRIZED.fullmatch(f"{path}.{leaf}")
            owner, matrix = (modules[found[1] or ""], found[2]) if found else (part, leaf)
            if isinstance(owner, nn.Embedding):
                embedded.add(names[p])
            elif p.dim() >= 2 and _MATRIX.fullmatch(matrix):
                uses.append(names[p])
                if not found:
                    owners.setdefault(names[p], owner)
    tied = [name for name in uses if name in embedded]
    last = (tied or uses or [""])[-1]
    return {name: owner for name, owner in owners.items() if name not in embedded}, last


def _match(module: nn.Module, rule: Rule, params: Mapping[str, nn.Parameter], what: str) -> set[str]:
    """The names of `params` that a rule chooses.

    A rule is a predicate (name, parameter) -> bool, one or more glob patterns over names, or one of
    `auto` (what the module's own `prunable` attribute says, else like `body` if there are any), `conv` (every
    convolution), `body` (every weight matrix but the last, of attention and recurrent layers too), `inner` (all but the
    first and the last), `none`.
    """
    if rule == "auto" and (own := getattr(module, "prunable", None)) not in (None, "auto"):
        return _match(module, own, params, what)
    if rule == "none":
        return set()
    if callable(rule):
        names = {name for name, p in params.items() if rule(name, p)}
    elif rule in ("auto", "conv", "body", "inner"):
        matrices, last = _matrices(module)
        convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        if rule == "conv":
            names = {name for name, owner in matrices.items() if isinstance(owner, convs)}
        else:
            names = set(list(matrices)[rule == "inner" :]) - {last}
        names &= set(params)
    else:
        names = set()
        for glob in [rule] if isinstance(rule, str) else rule:
            found = {name for name in params if fnmatch.fnmatchcase(name, glob)}
            if not found:
                raise _no_match(glob, what, params, _tied(module, glob))
            names |= found
    if not names and rule != "auto":  # a model with a single matrix can still be trained densely
        raise _no_match(rule, what, params)
    return names


def _tied(module: nn.Module, glob: str) -> str:
    """A hint if a glob names a tied weight by another of its names."""
    main = {p: name for name, p in module.named_parameters()}
    names = [(name, main[p]) for name, p in module.named_parameters(remove_duplicate=False)]
    tied = [f"{n!r} is tied to {own!r}: use that name. " for n, own in names if fnmatch.fnmatchcase(n, glob)]
    return "".join(tied[:1])


def _no_match(rule: object, what: str, params: Mapping[str, nn.Parameter], hint: str = "") -> ConfigError:
    named = "conv, body, inner, none"
    if what == "prunable":
        named = f"auto, {named} (nothing is sparse, for dense training)"
    return ConfigError(
        f"{what} = {rule!r} matches no parameter. {hint}The model's trainable parameters are: "
        f"{', '.join(params) or 'none'}. Give a glob such as 'features.*.weight', a predicate (name, parameter) -> "
        f"bool, or one of {named}."
    )
