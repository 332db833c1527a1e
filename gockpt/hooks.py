"""Where gockpt meets torch: hooks on optimizers, wraps of ``zero_grad`` and ``scaler.step``.

Everything here only forwards to the engine, on the training thread, and is undone by ``remove``.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from gockpt.errors import ConfigError

log = logging.getLogger("gockpt")

CALLERS = 12
"""Frames above an optimizer's hook in which a scaler is looked for; torch's own are three."""


class Listener(Protocol):
    """What the hooks call."""

    def before_update(self, index: int, *, unsure: str | None) -> None:
        """An optimizer is about to change the state.

        Args:
            unsure: why its gradients are not yet those that it will use, or None.
        """
        ...

    def after_update(self, index: int) -> None:
        """An optimizer has changed the state."""
        ...

    def fence(self) -> None:
        """Gradient buffers are about to be written."""
        ...

    def scaler_skipped(self) -> None:
        """The scaler left an update out."""
        ...


_taken: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class Hooks:
    """All hooks of one checkpointer."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        extras: Mapping[str, object],
        listener: Listener,
    ) -> None:
        """
        Raises:
            ConfigError: another checkpointer has its hooks on one of the optimizers.
        """
        if any(optimizer in _taken for optimizer in optimizers.values()):
            raise ConfigError(
                "a second Checkpointer on the same optimizer; close the first one before"
            )
        self._listener = listener
        self._optimizers = list(optimizers.values())
        self._undo: list[Callable[[], None]] = []
        self._calls = 0
        self._pre_hooks: list[tuple[Any, int]] = []
        self._post_hooks: list[tuple[Any, int]] = []
        for index, optimizer in enumerate(self._optimizers):
            self._attach(index, optimizer)
            self._wrap_zero_grad(optimizer)
        self.order()
        self._wrap_zero_grad(model)
        scalers = [one for one in extras.values() if isinstance(one, torch.amp.GradScaler)]
        for scaler in scalers:
            self._wrap_scaler(scaler)
        self._scaler_is_known = bool(scalers)

    def _attach(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._calls += 1
            if not self._scaler_is_known:
                self._scaler_is_known = True
                _warn_of_scaler(sys._getframe())
            unsure = None
            if kwargs.get("closure") is not None or any(arg is not None for arg in args[1:]):
                unsure = "optimizer.step() was called with a closure"
            elif next(reversed(optimizer._optimizer_step_pre_hooks)) != handle.id:
                unsure = "another hook of the optimizer ran after gockpt's"
            self._listener.before_update(index, unsure=unsure)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._listener.after_update(index)

        handle = optimizer.register_step_pre_hook(before)
        self._pre_hooks.append((optimizer._optimizer_step_pre_hooks, handle.id))
        other = optimizer.register_step_post_hook(after)
        self._post_hooks.append((optimizer._optimizer_step_post_hooks, other.id))
        _taken.add(optimizer)
        self._undo += [handle.remove, other.remove, lambda: _taken.discard(optimizer)]

    def _wrap_zero_grad(self, owner: Any) -> None:
        original = owner.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not set_to_none:
                self._listener.fence()
            original(set_to_none=set_to_none)

        self._replace(owner, "zero_grad", _Wrap(owner, "zero_grad", zero_grad))

    def _wrap_scaler(self, scaler: torch.amp.GradScaler) -> None:
        original = scaler.step

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls = self._calls
            result = original(optimizer, *args, **kwargs)
            if calls == self._calls and optimizer in self._optimizers:
                self._listener.scaler_skipped()
            return result

        self._replace(scaler, "step", _Wrap(scaler, "step", step))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name)

        def undo() -> None:
            if vars(owner).get(name) is value:
                if before is None:
                    delattr(owner, name)
                else:
                    object.__setattr__(owner, name, before)

        object.__setattr__(owner, name, value)
        self._undo.append(undo)

    def order(self) -> None:
        """Put our hooks next to the update: behind the user's own (clipping, say), and before."""
        for hooks, key in self._pre_hooks:
            if next(reversed(hooks)) != key:
                hooks.move_to_end(key)
        for hooks, key in self._post_hooks:
            if next(iter(hooks)) != key:
                hooks.move_to_end(key, last=False)

    def remove(self) -> None:
        """Take all hooks off again."""
        while self._undo:
            self._undo.pop()()


def _warn_of_scaler(frame: FrameType) -> None:
    """A scaler is nowhere to be found but among the callers of an update."""
    for caller in islice(_callers(frame), CALLERS):
        # Only of this one: looking at the locals of a frame keeps them alive until it ends.
        if caller.f_code is not torch.amp.GradScaler.step.__code__:
            continue
        if caller.f_locals["self"].is_enabled():
            log.warning(
                "a gradient scaler is in use but not in extras: it will not be restored, and the "
                "passes that it skips are not counted"
            )
        return


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Wrap:
    """Stands in for a method of one object; a copy of the object gets its own method back."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled as the method that it hides: averaged models are deep copies, and the
        # copy's zero_grad must not be that of the original.
        return getattr, (self._owner, self._name)
