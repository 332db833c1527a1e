"""What is known about torch's optimizers: which updates can be replayed, bit for bit, and how.

All of it is looked up on the training thread, before and during a capture. What always holds: a
parameter for which :func:`obstacle` gives no reason is updated to the same bits when torch's own
optimizer class is run over views of any blocks of it, cut at multiples of :data:`gockpt.state.CUT`
elements. The facts below were found by experiment and are held by ``tests/test_optim.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gockpt.state import CUT, memory_order

Implementation = Literal["fused", "foreach", "forloop"]
Group = Mapping[str, Any]

FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of a group that choose an implementation; they change nothing in what is computed."""

LOOP_GRAIN = 32_768
"""ATen runs an elementwise loop over fewer elements than this on one thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of torch's elementwise optimizers.

    A key of ``elementwise`` that needs an option of the group is written ``option:key``.
    """

    cls: type[Optimizer]
    elementwise: tuple[str, ...]
    scalar: tuple[str, ...] = ("step",)
    fused_cpu: bool = False
    """Has a fused CPU kernel: its replay runs at memory speed (that of others 5–30 × slower)."""
    rounds_once: bool = False
    """That kernel computes 16-bit numbers in 32 bits and rounds each result once, as the fused
    kernels of accelerators do. SGD's leaves them as they are wherever it is vectorised
    (pytorch/pytorch#191763), and Adagrad has no other fused kernel."""

    @property
    def name(self) -> str:
        return self.cls.__name__

    @property
    def known(self) -> frozenset[str]:
        """Every elementwise key that its state may hold, whatever the options."""
        return frozenset(key.rpartition(":")[2] for key in self.elementwise)


_KINDS = (
    Kind(
        cls=torch.optim.Adam,
        elementwise=("exp_avg", "exp_avg_sq", "amsgrad:max_exp_avg_sq"),
        fused_cpu=True,
        rounds_once=True,
    ),
    Kind(
        cls=torch.optim.AdamW,
        elementwise=("exp_avg", "exp_avg_sq", "amsgrad:max_exp_avg_sq"),
        fused_cpu=True,
        rounds_once=True,
    ),
    Kind(
        cls=torch.optim.SGD,
        elementwise=("momentum:momentum_buffer",),
        scalar=(),
        fused_cpu=True,
    ),
    Kind(cls=torch.optim.Adagrad, elementwise=("sum",), fused_cpu=True),
    Kind(
        cls=torch.optim.NAdam,
        elementwise=("exp_avg", "exp_avg_sq"),
        scalar=("step", "mu_product"),
    ),
    Kind(cls=torch.optim.RAdam, elementwise=("exp_avg", "exp_avg_sq")),
    Kind(
        cls=torch.optim.RMSprop,
        elementwise=("square_avg", "momentum:momentum_buffer", "centered:grad_avg"),
    ),
    Kind(cls=torch.optim.Adadelta, elementwise=("square_avg", "acc_delta")),
    Kind(cls=torch.optim.Adamax, elementwise=("exp_avg", "exp_inf")),
    Kind(cls=torch.optim.ASGD, elementwise=("ax",), scalar=("step", "eta", "mu")),
    Kind(cls=torch.optim.Rprop, elementwise=("prev", "step_size")),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def kind_of(optimizer: Optimizer) -> Kind | None:
    """The kind of exactly this class; a subclass may compute anything and is unknown."""
    kind = KINDS.get(type(optimizer).__name__)
    return kind if kind is not None and type(optimizer) is kind.cls else None


def state_keys(kind: Kind, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The (elementwise, 0-dim) keys that a parameter's state has after its first gradient."""
    elementwise = []
    for entry in kind.elementwise:
        option, _, key = entry.rpartition(":")
        if not option or group.get(option):
            elementwise.append(key)
    return tuple(elementwise), kind.scalar


def implementation(group: Group, device_type: str) -> Implementation:
    """Which of its implementations torch runs for this group's update.

    With neither flag set torch takes foreach on accelerators and the plain loop on the CPU, never
    fused. (On accelerators a few cases fall back from foreach to the loop; that needs no telling
    apart here: both are replayed alike, or in 16 bits not at all, and only foreach may write
    gradients.)
    """
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    undecided = group.get("foreach") is None and group.get("fused") is None
    return "foreach" if undecided and device_type != "cpu" else "forloop"


def replay_implementation(kind: Kind, group: Group, device_type: str) -> Implementation:
    """Which implementation the replay, on the CPU, has to run for this group's update."""
    if device_type == "cpu":
        return implementation(group, device_type)
    return "fused" if kind.fused_cpu else "forloop"


def device_type(group: Group) -> str:
    """Where the group's parameters live: ``"cpu"``, ``"cuda"``, …"""
    return next((str(p.device.type) for p in group["params"]), "cpu")


def writes_gradients(optimizer: Optimizer, group: Group) -> bool:
    """Whether the update about to run writes the group's ``.grad`` tensors in place.

    Gradient copies must then be complete before it starts. Two updates do: a fused one that
    unscales (``grad_scale`` set by the GradScaler; it doesn't bump the version counter), and SGD's
    foreach one with nesterov where no earlier operation has made a copy of the gradients. Unknown
    optimizers are assumed to write.
    """
    kind = kind_of(optimizer)
    if kind is None:
        return True
    runs = implementation(group, device_type(group))
    if runs == "fused":
        return getattr(optimizer, "grad_scale", None) is not None
    copied = group["maximize"] or _is_nonzero(group.get("weight_decay", 0))
    return kind.name == "SGD" and runs == "foreach" and bool(group["nesterov"]) and not copied


def _is_nonzero(value: Any) -> bool:
    # A tensor on an accelerator isn't read back here; zero is the cautious answer.
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and bool(value != 0)
    return bool(value != 0)


def is_compiled(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` was replaced by a compiled one, below any scheduler's wrapper."""
    step: Any = vars(optimizer).get("step")
    while step is not None:
        if hasattr(step, "_torchdynamo_orig_callable"):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a run of memory, each once, in some order of the dimensions."""
    return tensor.layout is torch.strided and memory_order(tensor) is not None


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether equal positions in memory of two dense tensors are equal indices."""
    return a.shape == b.shape and (a.stride() == b.stride() or _layout(a) == _layout(b))


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions whose stride means anything."""
    if tensor.numel() <= 1:
        return []
    return [dim for dim in zip(tensor.shape, tensor.stride(), strict=True) if dim[0] != 1]


def group_obstacle(optimizer: Optimizer, group: Group, *, allow_slow: bool = False) -> str | None:
    """Why no parameter of this group can be replayed; None if they may be.

    Args:
        allow_slow: accept optimizers that have no fused CPU kernel.
    """
    name = type(optimizer).__name__
    kind = kind_of(optimizer)
    if kind is None:
        return f"{name} is not one of torch's elementwise optimizers"
    if is_compiled(optimizer):
        return f"{name}.step is compiled"
    for flag in ("capturable", "differentiable"):
        if group.get(flag):
            return f"{name} is {flag}"
    if not kind.fused_cpu and not allow_slow:
        return f"{name} has no fused CPU kernel, its replay would be too slow"
    for key in optimizer.defaults.keys() - FLAGS:
        if key in group and not is_recordable(group[key]):
            return f"{name}'s {key} is a {type(group[key]).__name__}, which a recipe cannot hold"
    return None


def is_recordable(value: Any) -> bool:
    """Whether a recipe can hold this hyper-parameter so that the same numbers are computed."""
    if isinstance(value, tuple | list):
        return all(is_recordable(item) and not isinstance(item, tuple | list) for item in value)
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point() and not value.requires_grad
    return value is None or isinstance(value, bool | int | float | str)


def obstacle(
    optimizer: Optimizer, group: Group, param: Tensor, *, allow_slow: bool = False
) -> str | None:
    """Why this parameter's updates cannot be replayed, or None if they can be.

    A reason is a clause without subject ("torch's fused SGD … does not repeat"): the parameter is
    then captured whole in the last window. Cheap enough to ask for each parameter once a capture
    (about 25 µs); :func:`gradient_obstacle` says the rest when the gradients are there.
    """
    reason = group_obstacle(optimizer, group, allow_slow=allow_slow)
    kind = kind_of(optimizer)
    if reason is not None or kind is None:
        return reason
    return (
        _tensor_obstacle(param)
        or _state_obstacle(kind, optimizer.state.get(param, {}), param)
        or _repeat_obstacle(kind, group, param)
    )


def _tensor_obstacle(param: Tensor) -> str | None:
    if type(param) not in (Tensor, torch.nn.Parameter):
        return f"it is a {type(param).__name__}, not a plain tensor"
    if param.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"{str(param.dtype).removeprefix('torch.')} parameters are not replayed"
    if not is_dense(param):
        return "it is not dense in memory"
    return None


def _state_obstacle(kind: Kind, state: Mapping[Any, Any], param: Tensor) -> str | None:
    for key, value in state.items():
        if value is None:
            continue
        if key not in kind.known and key not in kind.scalar:
            return f"its state has a key that {kind.name} does not use: {key!r}"
        if not isinstance(value, Tensor):
            return f"its state {key!r} is not a tensor"
        if key in kind.scalar:
            if value.numel() != 1 or not value.is_floating_point():
                return f"its state {key!r} is not one floating-point number"
        elif value.dtype != param.dtype or value.device != param.device:
            return f"its state {key!r} has another dtype or device than the parameter"
        elif not is_dense(value) or not same_layout(value, param):
            return f"its state {key!r} lies in memory unlike the parameter"
    return None


def _repeat_obstacle(kind: Kind, group: Group, param: Tensor) -> str | None:
    """Updates that torch itself does not repeat, or not for blocks."""
    if param.dtype.itemsize != 2:
        return None
    runs = implementation(group, param.device.type)
    if param.device.type != "cpu":
        return _rounding_obstacle(kind, runs, param.device.type)
    if kind.name == "SGD" and runs == "fused" and group["momentum"] != 0:
        return "torch's fused SGD with momentum does not repeat in 16 bits"
    if runs != "fused" and not _loop_repeats(param.numel()):
        return "torch's 16-bit loops depend on how the threads share the tensor"
    return None


def _rounding_obstacle(kind: Kind, runs: Implementation, device_type: str) -> str | None:
    """Why the CPU does not come to what an accelerator computes in 16 bits.

    The last bits of 32 differ by little, and the proof allows for it. Those of 16 are half a
    percent: wherever something is rounded that the other does not round, an update differs by
    more than the proof may let pass.
    """
    if not kind.rounds_once:
        return f"the CPU does not repeat what {kind.name} computes in 16 bits on {device_type}"
    if runs != "fused":
        return (
            f"{kind.name} on {device_type} rounds to 16 bits after every operation, its replay "
            "once; with fused=True both round once"
        )
    return None


def _loop_repeats(numel: int) -> bool:
    """Whether a 16-bit loop over a whole tensor equals the same loop over blocks of it.

    ATen gives each thread an equal run of elements; the vectorised part of a run rounds once where
    its scalar tail rounds twice. So the runs have to be multiples of the cut (32-bit loops give the
    same bits either way).
    """
    threads = min(torch.get_num_threads(), -(-numel // LOOP_GRAIN))
    return threads <= 1 or -(-numel // threads) % CUT == 0


def gradient_obstacle(param: Tensor, grad: Tensor) -> str | None:
    """Why this gradient cannot be sent for a replay, or None if it can be."""
    if grad.layout is not torch.strided:
        return "its gradient is sparse"
    if type(grad) is not Tensor:
        return f"its gradient is a {type(grad).__name__}, not a plain tensor"
    if grad.dtype != param.dtype or grad.device != param.device:
        return "its gradient has another dtype or device than the parameter"
    if not same_layout(grad, param):
        return "its gradient lies in memory unlike the parameter"
    return None
