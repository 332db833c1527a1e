"""The live objects behind the image: which tensor of the user's stands at which entry.

Runs on the training thread of the trainer. An inventory is true for one *structure* of model and
optimizers (which tensors there are); :meth:`Inventory.stale` says when the structure has changed
and a new one must be taken.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gockpt import optim
from gockpt.errors import StateError
from gockpt.state import (
    PAGE,
    Entry,
    Layout,
    ParamLayout,
    align,
    dtype_name,
    memory_order,
    torch_dtype,
)

Optimizers = Mapping[str, torch.optim.Optimizer]

FROZEN = "it is frozen"
MASTER = "master"
"""The key of the copy that an optimizer updates in place of the model's own tensor."""

_PLAIN = (bool, int, float, str)
_COMPILED = "_orig_mod"
"""What ``torch.compile`` calls the module that it wraps."""


@dataclass(slots=True, kw_only=True)
class LiveParam:
    """One parameter that an optimizer updates, with what is needed to capture and replay it."""

    name: str
    optimizer: torch.optim.Optimizer
    optimizer_index: int
    group_index: int
    param: Tensor
    model_tensor: Tensor | None
    """The model's tensor of the same name where the optimizer holds a master copy of it."""
    obstacle: str | None
    """Why it cannot be replayed, or None."""
    is_master: bool = False
    """The optimizer's parameter is not one of the model's tensors."""

    @property
    def frozen(self) -> bool:
        """Whether no gradient will come (a master copy is frozen with its model's tensor)."""
        return _frozen(self.param, self.model_tensor)

    @property
    def group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[self.group_index]
        return group

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's live state of this parameter (empty before its first gradient)."""
        state: dict[str, Any] = self.optimizer.state.get(self.param, {})
        return state


@dataclass(slots=True)
class Inventory:
    """A layout, and the live tensors that belong into it."""

    layout: Layout
    replayable: list[LiveParam]
    """In the order of ``layout.params``."""
    others: list[LiveParam]
    model_tensors: dict[str, Tensor]
    """Canonical name → tensor, aliases left out."""
    optimizers: dict[str, torch.optim.Optimizer]
    entry_of: dict[str, int] = field(default_factory=dict)
    _owners: list[dict[str, Any]] = field(default_factory=list)
    """The modules' dictionaries of parameters and buffers."""
    _owned_ids: list[int] = field(default_factory=list)
    _groups: list[tuple[int, ...]] = field(default_factory=list)
    _named: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    _with_extra: nn.Module | None = None
    """The model, if any of its modules has extra state."""

    def stale(self) -> str | None:
        """What has changed in the structure since this inventory was taken, or None."""
        if self._owned() != self._owned_ids:
            return "a tensor of the model was replaced"
        if _group_ids(self.optimizers) != self._groups:
            return "the parameters of an optimizer changed"
        for live in self.others:
            if live.frozen != (live.obstacle == FROZEN):
                return f"{live.name!r} was frozen or unfrozen"
            for key, value in _leaves(live.state):
                if not self._fits(live, key, value):
                    return f"the optimizer state {key!r} of {live.name!r} changed its shape"
        return None

    def _owned(self) -> list[int]:
        # By map: this runs over every tensor of the model, on the training thread.
        return list(map(id, chain.from_iterable(map(dict.values, self._owners))))

    def suspect(self) -> bool:
        """Whether a group was added or emptied: a cheap look, for every window."""
        sizes = [
            len(group["params"])
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
        ]
        return sizes != [len(group) for group in self._groups]

    def _fits(self, live: LiveParam, key: str, value: Tensor) -> bool:
        index = self.entry_of.get(self.state_name(live, key))
        if index is None:
            return False
        entry = self.layout.entries[index]
        return entry.shape == tuple(value.shape) and entry.dtype == dtype_name(value.dtype)

    def state_name(self, live: LiveParam, key: str) -> str:
        """The global name of a state tensor: ``optim.[<optimizer key>.]<fqn>.<key>``."""
        return _state_name(list(self.optimizers), live, key)

    def present(self) -> Iterator[tuple[int, Tensor]]:
        """Every tensor that exists now, with the index of its entry."""
        for name, tensor in self.model_tensors.items():
            yield self.entry_of[name], tensor
        for live in (*self.replayable, *self.others):
            if live.is_master:
                yield self.entry_of[self.state_name(live, MASTER)], live.param
            for key, value in _leaves(live.state):
                index = self.entry_of.get(self.state_name(live, key))
                if index is None:
                    raise StateError(
                        f"optimizer state {key!r} of {live.name!r} appeared unexpectedly"
                    )
                yield index, value

    def obstacles(self) -> Counter[str]:
        """Why parameters cannot be replayed, and how many each."""
        return Counter(live.obstacle for live in self.others if live.obstacle is not None)

    def buffers(self) -> dict[int, Tensor]:
        """The model's tensors that no optimizer trains and that are no parameters, by entry."""
        trained = {id(live.param) for live in (*self.replayable, *self.others)}
        cast = {param.derived for param in self.layout.params}
        return {
            index: tensor
            for name, tensor in self.model_tensors.items()
            if not isinstance(tensor, nn.Parameter) and id(tensor) not in trained
            if (index := self.entry_of[name]) not in cast
        }

    def group_options(self) -> list[dict[str, Any]]:
        """Hyper-parameters of every group, with its parameters' names in the group's order."""
        if not self._named:
            self._named = self._names_by_group()
        out: list[dict[str, Any]] = []
        for index, (name, optimizer) in enumerate(self.optimizers.items()):
            for number, group in enumerate(optimizer.param_groups):
                options = {
                    option: _host_value(value)
                    for option, value in group.items()
                    if option not in ("params", "param_names")
                }
                names = self._named.get((index, number), [])
                out.append({"optimizer": name, "params": names, "options": options})
        return out

    def _names_by_group(self) -> dict[tuple[int, int], list[str]]:
        """Parameter names in the order of each group, by (optimizer, group)."""
        name_of = {
            (live.optimizer_index, id(live.param)): live.name
            for live in (*self.replayable, *self.others)
        }
        return {
            (index, number): [
                name_of[key] for param in group["params"] if (key := (index, id(param))) in name_of
            ]
            for index, optimizer in enumerate(self.optimizers.values())
            for number, group in enumerate(optimizer.param_groups)
        }

    def extra_state(self) -> dict[str, Any]:
        """What modules return from ``get_extra_state``."""
        if self._with_extra is None:
            return {}
        state = self._with_extra.state_dict()
        return {
            plain_name(key): value for key, value in state.items() if not isinstance(value, Tensor)
        }

    def plain_state(self) -> dict[str, Any]:
        """State that is more than tensors by name, with a :func:`placeholder` for each of those.

        Unknown optimizers keep numbers, flags and nested containers there. What is not in here is
        known by the names of its tensors alone: ``optim.<parameter>.<key>``, no dot in the key.
        """
        return {
            self.state_name(live, "")[:-1]: _without_tensors(live.state)
            for live in self.others  # replayable ones keep nothing but tensors
            if not all(_is_plain_name(key, value) for key, value in live.state.items())
        }


def take(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    allow_slow: bool = False,
    refused: Mapping[tuple[int, int], str] | None = None,
    spare: int = 0,
    derive: bool = True,
) -> Inventory:
    """Find everything that must be saved and lay it out.

    Args:
        allow_slow: also replay optimizers whose replay is slow.
        refused: (optimizer, group) → why its updates were found not to repeat.
        spare: bytes kept free at the end of the image.
        derive: leave out weights that are the cast of their master copy.

    Raises:
        StateError: a tensor cannot be named or stored; the message says how to change that.
    """
    tensors, aliases = _model_tensors(model)
    replayable, others = _optimizer_params(
        tensors, aliases, optimizers, _Obstacles(allow_slow, refused or {})
    )
    keys = list(optimizers)
    builder = _LayoutBuilder(derive)
    canonical = {id(tensor): name for name, tensor in tensors.items()}
    params = [builder.add_param(live, keys, canonical, aliases) for live in replayable]
    for name, tensor in tensors.items():
        if name not in builder.names:
            builder.add(name, tensor, aliases.get(name, ()))
    for live in others:
        builder.add_other(live, keys)
    size = align(builder.offset + spare, PAGE)
    layout = Layout(entries=builder.entries, params=params, size=size)
    found = Inventory(
        layout=layout,
        replayable=replayable,
        others=others,
        model_tensors=tensors,
        optimizers=dict(optimizers),
        entry_of={entry.name: index for index, entry in enumerate(builder.entries)},
        _owners=_owners(model),
        _groups=_group_ids(optimizers),
        _with_extra=model if _has_extra_state(model) else None,
    )
    found._owned_ids = found._owned()
    return found


class _LayoutBuilder:
    def __init__(self, derive: bool) -> None:
        self.derive = derive
        self.entries: list[Entry] = []
        self.names: set[str] = set()
        self.offset = 0

    def add(self, name: str, like: Tensor, aliases: tuple[str, ...] = ()) -> int:
        return self.reserve(name, tuple(like.shape), _order(like), like.dtype, aliases)

    def reserve(
        self,
        name: str,
        shape: tuple[int, ...],
        order: tuple[int, ...],
        dtype: torch.dtype,
        aliases: tuple[str, ...] = (),
    ) -> int:
        if name in self.names:
            raise StateError(
                f"two tensors would both be saved as {name!r}: parameters, or keys of an "
                "optimizer's state (0 and '0', say), that are written alike; rename one of them"
            )
        entry = Entry(
            name=name,
            dtype=dtype_name(dtype),
            shape=shape,
            order=order,
            offset=self.offset,
            aliases=aliases,
        )
        self.offset = align(self.offset + entry.nbytes)
        self.entries.append(entry)
        self.names.add(name)
        return len(self.entries) - 1

    def add_param(
        self,
        live: LiveParam,
        keys: list[str],
        canonical: dict[int, str],
        aliases: dict[str, tuple[str, ...]],
    ) -> ParamLayout:
        """Lay one replayable parameter out: parameter, its cast, elementwise state, 0-dim state."""
        name = canonical.get(id(live.param))
        if name is not None:
            param = self.add(name, live.param, aliases.get(name, ()))
        else:
            param = self.add(_state_name(keys, live, MASTER), live.param)
        derived = None
        if self.derive and name is None and live.model_tensor is not None and is_cast(live):
            cast = canonical[id(live.model_tensor)]
            derived = self.add(cast, live.model_tensor, aliases.get(cast, ()))
        elementwise, scalars = optim.state_keys(
            optim.KINDS[type(live.optimizer).__name__], live.group
        )
        order = _order(live.param)
        state: dict[str, int] = {}
        for key in elementwise:
            existing = live.state.get(key)
            dtype = existing.dtype if isinstance(existing, Tensor) else live.param.dtype
            state[key] = self.reserve(
                _state_name(keys, live, key), tuple(live.param.shape), order, dtype
            )
        zero_dim: dict[str, int] = {}
        for key in scalars:
            existing = live.state.get(key)
            dtype = existing.dtype if isinstance(existing, Tensor) else torch.float32
            zero_dim[key] = self.reserve(_state_name(keys, live, key), (), (), dtype)
        return ParamLayout(
            name=live.name,
            optimizer=live.optimizer_index,
            group=live.group_index,
            param=param,
            state=state,
            scalars=zero_dim,
            derived=derived,
        )

    def add_other(self, live: LiveParam, keys: list[str]) -> None:
        if live.is_master:
            self.add(_state_name(keys, live, MASTER), live.param)
        for key, value in _leaves(live.state):
            self.add(_state_name(keys, live, key), value)


def _frozen(param: Tensor, model_tensor: Tensor | None) -> bool:
    return not (param if model_tensor is None else model_tensor).requires_grad


def is_cast(live: LiveParam) -> bool:
    """Whether the model's tensor is, bit for bit, the 16-bit cast of the master copy."""
    model = live.model_tensor
    return (
        model is not None
        and model.dtype in (torch.bfloat16, torch.float16)
        and model.dtype != live.param.dtype
        and memory_order(model) == memory_order(live.param)
        and bool(torch.equal(model.detach(), live.param.detach().to(model.dtype)))
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Memory order; a tensor with holes is stored densely in C order."""
    order = memory_order(tensor)
    return tuple(range(tensor.dim())) if order is None else order


def _state_name(keys: list[str], live: LiveParam, key: str) -> str:
    middle = f"{keys[live.optimizer_index]}." if len(keys) > 1 else ""
    return f"optim.{middle}{live.name}.{key}"


def _leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in an optimizer's state of one parameter; nested containers become paths."""
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        path = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, Mapping | list | tuple):
            yield from _leaves(value, f"{path}/")


def _is_plain_name(key: object, value: object) -> bool:
    """Whether a tensor in an optimizer's state can be told by its name alone."""
    named = type(key) is str and "." not in key and key != MASTER
    return named and isinstance(value, Tensor)


def placeholder(path: str) -> tuple[str, str]:
    """What stands for the tensor of this path in a plain state."""
    return ("gockpt.tensor", path)


def _without_tensors(state: Any, prefix: str = "") -> Any:
    """The same containers, with a placeholder for each tensor."""
    if isinstance(state, Tensor):
        return placeholder(prefix[:-1])
    if isinstance(state, Mapping):
        made = copy.copy(state)
        for key, value in state.items():
            made[key] = _without_tensors(value, f"{prefix}{key}/")  # type: ignore[index]
        return made
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(v, f"{prefix}{i}/") for i, v in enumerate(state))
    return state


def _host_value(value: Any) -> Any:
    """A private copy, on the host: schedulers change options in place."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return value if value is None or isinstance(value, _PLAIN) else copy.deepcopy(value)


def _group_ids(optimizers: Optimizers) -> list[tuple[int, ...]]:
    return [
        tuple(map(id, group["params"]))
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
    ]


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """All tensors of the model's state dict, tied ones once, and the other names of those."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for fqn, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue  # a module's extra state: saved with the extras
        name = f"model.{plain_name(fqn)}"
        key = _identity(value)
        if key in first:
            aliases[first[key]] = (*aliases.get(first[key], ()), name)
            continue
        if name in tensors:
            raise StateError(
                f"two tensors of the model are named {name.removeprefix('model.')!r}, compiled or "
                "not; rename one of the modules"
            )
        first[key] = name
        tensors[name] = value
    return tensors, aliases


def plain_name(name: str) -> str:
    """The name of a tensor without the part that ``torch.compile`` adds to it.

    So a model that was compiled goes on with checkpoints of one that was not, and the other way.
    """
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _owners(model: nn.Module) -> list[dict[str, Any]]:
    """The dictionaries that hold the model's tensors."""
    return [
        holder
        for module in model.modules()
        for holder in (module._parameters, module._buffers)
        if holder
    ]


def _has_extra_state(model: nn.Module) -> bool:
    return any(type(m).get_extra_state is not nn.Module.get_extra_state for m in model.modules())


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.numel() == 0:
        return (id(tensor),)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _optimizer_params(
    tensors: dict[str, Tensor],
    aliases: dict[str, tuple[str, ...]],
    optimizers: Optimizers,
    obstacles: _Obstacles,
) -> tuple[list[LiveParam], list[LiveParam]]:
    by_identity = {id(tensor): name.removeprefix("model.") for name, tensor in tensors.items()}
    by_name = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for name, others in aliases.items():
        by_name.update({other.removeprefix("model."): tensors[name] for other in others})
    replayable: list[LiveParam] = []
    plain: list[LiveParam] = []
    seen: dict[int, LiveParam] = {}
    for index, optimizer in enumerate(optimizers.values()):
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [None] * len(group["params"])
            for param, given in zip(group["params"], names, strict=True):
                fqn = by_identity.get(id(param)) or (given and plain_name(given))
                if fqn is None:
                    raise StateError(
                        f"a parameter {tuple(param.shape)} of the optimizer is not one of the "
                        "model's; build the optimizer from named parameters: "
                        "Optimizer(list(named_params), …) with (name, tensor) pairs"
                    )
                model_tensor = None if id(param) in by_identity else by_name.get(fqn)
                if model_tensor is not None and model_tensor.shape != param.shape:
                    model_tensor = None
                live = LiveParam(
                    name=fqn,
                    optimizer=optimizer,
                    optimizer_index=index,
                    group_index=number,
                    param=param,
                    model_tensor=model_tensor,
                    obstacle=FROZEN
                    if _frozen(param, model_tensor)
                    else obstacles.of(index, number, optimizer, param),
                    is_master=id(param) not in by_identity,
                )
                if id(param) in seen:
                    seen[id(param)].obstacle = live.obstacle = "it is in two optimizers"
                seen[id(param)] = live
                plain.append(live)
    _refuse_equal_names(plain)
    replayable = [live for live in plain if live.obstacle is None]
    return replayable, [live for live in plain if live.obstacle is not None]


@dataclass(frozen=True, slots=True)
class _Obstacles:
    """Why a parameter cannot be replayed."""

    allow_slow: bool
    refused: Mapping[tuple[int, int], str]

    def of(
        self, index: int, number: int, optimizer: torch.optim.Optimizer, param: Tensor
    ) -> str | None:
        if (index, number) in self.refused:
            return self.refused[index, number]
        group = optimizer.param_groups[number]
        return optim.obstacle(optimizer, group, param, allow_slow=self.allow_slow)


def _refuse_equal_names(params: list[LiveParam]) -> None:
    seen: set[tuple[int, str]] = set()
    for live in params:
        key = (live.optimizer_index, live.name)
        if key in seen:
            raise StateError(
                f"two parameters of an optimizer are named {live.name!r}; give them different names"
            )
        seen.add(key)


def element_bytes(layout: Layout, param: ParamLayout) -> int:
    """Bytes to send for one element of a parameter: itself and its elementwise state."""
    indices = (param.param, *param.state.values())
    return sum(torch_dtype(layout.entries[index].dtype).itemsize for index in indices)
