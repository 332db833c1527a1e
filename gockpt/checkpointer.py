"""The face of the library: :class:`Checkpointer`.

Everything here runs on the training thread. The parts behind it: the engine of
:mod:`gockpt.strategies`, a device, and the agent.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import torch
from torch import nn

from gockpt import restore as restoring
from gockpt import strategies
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle
from gockpt.agent.launch import AgentMode
from gockpt.agent.protocol import PROTOCOL, Hello, Pace
from gockpt.devices import Device, open_device
from gockpt.errors import ConfigError, GockptError
from gockpt.extras import Extras
from gockpt.faults import Fault
from gockpt.hooks import Hooks
from gockpt.restore import Restored
from gockpt.storage import Checkpoint, load_newest, scan
from gockpt.storage import open as open_checkpoint
from gockpt.strategies.engine import Engine, OnError, Settings, WhenBusy

log = logging.getLogger("gockpt")

SWITCH_INTERVAL = 0.0002
"""Seconds after which Python's threads hand over the interpreter while a Checkpointer is open."""

REPLAY_PER_THREAD = 0.8e9
"""Parameter updates a second and thread of a fused replay, until a real one has been measured."""


class Checkpointer:
    """Saves the state of a training loop every so many steps, without stopping it.

    Used as a context manager around the loop, with :meth:`step` at the end of every pass::

        with gockpt.Checkpointer(model, optimizer, "checkpoints/", every=100) as ckpt:
            ckpt.restore()
            while ckpt.current_step < total_steps:
                ...  # forward, backward, optimizer.step()
                ckpt.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        path: str | Path,
        *,
        every: int | None = None,
        strategy: str = "gockpt",
        keep: int | None = 2,
        extras: Mapping[str, object] | None = None,
        volumes: Sequence[str | Path] = (),
        windows: int | None = None,
        link_share: float = 0.9,
        proof: bool = True,
        require_exact: bool = False,
        when_busy: WhenBusy = "wait",
        on_error: OnError = "raise",
        agent: AgentMode = "process",
        device: Device | str | None = None,
        slots: int = 2,
        close_timeout: float = 3600.0,
        pace: Pace | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Start the agent and allocate all memory; the directory is locked from here on.

        Args:
            optimizer: one, or a dictionary of several by name.
            path: directory of the checkpoints, made if it is not there.
            every: steps between checkpoints; None: only where :meth:`save` is called.
            strategy: a name of :data:`gockpt.strategies.POLICIES`.
            keep: how many checkpoints stay; None: all.
            extras: further objects with ``state_dict`` and ``load_state_dict``, by name: scheduler,
                scaler, data loader. The random generators are always included.
            windows: forces the number of windows (for tests and experiments).
            link_share: share of the link to the host that may be used.
            proof: compare each checkpoint with the true state before it is committed.
            require_exact: refuse checkpoints whose proof is only ``close`` (on CUDA).
            when_busy: what to do if a checkpoint is due and no slot is free: wait, or skip it.
            on_error: raise what a checkpoint failed with at the next :meth:`step`, or warn.
            agent: as a process of its own, or as a thread of this one.
            device: a device or its name; None: where the model's parameters are.
            slots: checkpoints in host memory at a time.
            close_timeout: seconds that :meth:`close` gives the last writes.
            pace: modelled rates of the host, for the emulated accelerator.
            faults: fault points to arm in the agent, for tests.

        Raises:
            ConfigError: arguments that cannot be used.
            StateError: state that cannot be saved.
            LockedError: another process uses the directory.
        """
        _check_arguments(every=every, keep=keep, windows=windows, slots=slots, share=link_share)
        _check_choice("when_busy", when_busy, get_args(WhenBusy))
        _check_choice("on_error", on_error, get_args(OnError))
        _check_choice("agent", agent, get_args(AgentMode))
        if volumes:
            raise ConfigError("volumes are not supported yet; leave them out")
        _check_world()
        policy = strategies.policy(strategy)
        optimizers = _named(optimizer)
        self._model = model
        self._device, self._owns_device = _device(device, model)
        device_type = _device_type(model)
        self._extras = Extras(extras, device_type=device_type)
        self._root = Path(path)
        self._timeout = close_timeout
        self._closed = False
        self._engine: Engine | None = None
        self._client: AgentClient | None = None
        self._hooks: Hooks | None = None
        self._switching = sys.getswitchinterval()
        self._step_without_engine = 0
        self._saves = policy.saves
        _warn_of_missing(optimizers, extras or {})
        if not policy.saves:
            return
        self._extras.check()
        launch = secrets.token_hex(4)
        threads = torch.get_num_threads()
        hello = Hello(
            protocol=PROTOCOL,
            directory=str(self._root.absolute()),
            rank=0,
            world_size=1,
            run_id=secrets.token_hex(8),
            launch_id=launch,
            threads=threads,
            keep=keep,
            pace=pace or Pace(),
            proof=proof,
            exact=device_type == "cpu",
            require_exact=require_exact,
            faults=list(faults),
        )
        mode: AgentMode = "thread" if platform.system() != "Linux" else agent
        self._client = AgentClient(hello, mode=mode, recorder=self._device.recorder)
        try:
            self._client.begin()
            self._engine = Engine(
                model=model,
                optimizers=optimizers,
                extras=self._extras,
                policy=policy,
                device=self._device,
                client=self._client,
                settings=Settings(
                    every=every,
                    windows=windows,
                    link_share=link_share,
                    slots=slots,
                    proof=proof,
                    when_busy=when_busy,
                    on_error=on_error,
                    launch_id=launch,
                    replay_rate=(pace.replay if pace else None) or REPLAY_PER_THREAD * threads,
                    write_rate=pace.write if pace else None,
                ),
            )
            self._hooks = Hooks(model, optimizers, extras or {}, self._engine)
            # torch lets go of the interpreter in every operation. A thread that does many small
            # ones gets it back before the training thread wakes up, which then waits a whole
            # interval.
            sys.setswitchinterval(min(self._switching, SWITCH_INTERVAL))
            self._process = os.getpid()
            atexit.register(self._at_exit)
        except BaseException:
            self._client.close(1.0)
            raise

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """Passes made so far, those before the restored checkpoint included."""
        return self._step_without_engine if self._engine is None else self._engine.current_step

    def step(self) -> None:
        """The end of a pass. Without an update since the last call it does nothing.

        Raises:
            GockptError: what an earlier checkpoint failed with (``on_error="raise"``).
        """
        self._check_open()
        if self._engine is None or self._hooks is None:
            self._step_without_engine += 1
            return
        self._hooks.order()
        self._engine.end_pass()

    def save(self) -> Handle:
        """Ask for a checkpoint at the earliest step that costs no stall.

        Returns:
            Its future; joins a checkpoint that is already on its way.
        """
        self._check_open()
        if self._engine is None:
            raise ConfigError("strategy 'none' saves nothing; choose another one")
        return self._engine.request()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every checkpoint whose last step is over is durable.

        Raises:
            TimeoutError: not after ``timeout`` seconds.
            GockptError: what one of them failed with (``on_error="raise"``).
        """
        if self._engine is None or self._client is None:
            return
        self._engine.settle()
        client, engine = self._client, self._engine
        try:
            limit = self._timeout if timeout is None else timeout
            client.wait_for(lambda: client.idle(engine.open_sequence), limit, "earlier checkpoints")
        except GockptError as error:
            if not client.idle(engine.open_sequence):
                raise TimeoutError(str(error)) from error
            raise
        engine.raise_errors()

    @property
    def latest(self) -> int | None:
        """Step of the newest valid checkpoint of the directory, or None."""
        return next((one.step for one in scan(self._root) if one.problem is None), None)

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end (set by a signal, once that is supported)."""
        return False

    def restore(self, step: int | None = None) -> Restored | None:
        """Put the newest valid checkpoint (or that of ``step``) back into model, optimizers,
        extras.

        Every byte is checked while it is read; a damaged checkpoint is reported and the next older
        one used.

        Returns:
            What was restored, or None where the directory has no checkpoints.

        Raises:
            NoCheckpointError: ``step`` is not there, or nothing that is there is valid.
            StateError: the checkpoint does not fit the model.
        """
        self._check_open()
        started = time.monotonic()
        if self._engine is not None:
            self._engine.abort("a checkpoint was restored")
            self.wait()
        if step is None and not scan(self._root):
            log.info("%s has no checkpoints: a fresh start", self._root)
            return None
        checkpoint, tensors, problems = load_newest(self._root, step)
        for problem in problems:
            log.warning("not restored: %s", problem)
        self._apply(checkpoint, tensors)
        restored = Restored(
            step=checkpoint.step,
            path=checkpoint.path,
            source="ssd",
            problems=tuple(problems),
            proof=str(checkpoint.info.proof.get("outcome", "off")),
            seconds=time.monotonic() - started,
        )
        log.info(
            "restored step %d from %s (proof: %s)", restored.step, restored.path, restored.proof
        )
        return restored

    def _apply(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
        if self._engine is None or self._client is None:
            raise ConfigError("strategy 'none' restores nothing; choose another one")
        self._engine.refresh()
        restoring.apply(self._engine.inventory, self._model, tensors, checkpoint.groups)
        self._extras.load(checkpoint.extras["tree"], tensors)
        self._client.protect(checkpoint.path)
        self._engine.restored(checkpoint.step)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Copy what an open checkpoint still lacks, wait for all writes, end the agent.

        Raises:
            GockptError: what a checkpoint failed with (``on_error="raise"``).
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        sys.setswitchinterval(self._switching)
        failure: BaseException | None = None
        if self._hooks is not None:
            self._hooks.remove()
        if self._engine is not None and self._client is not None:
            try:
                self._engine.finish()
            except GockptError as error:
                failure = error
            try:
                self._client.close(self._timeout)
            except GockptError as error:
                failure = failure or error
            self._engine.close()
            if failure is None:
                self._engine.raise_errors()
        if self._owns_device:
            self._device.close()
        if failure is not None:
            raise failure

    def _at_exit(self) -> None:
        """A script that ends without :meth:`close` still gets its last checkpoint written."""
        if os.getpid() != self._process:
            return  # a fork of the trainer: the agent is not its own
        try:
            self.close()
        except GockptError as error:
            log.error("at exit: %s", error)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except GockptError as failed:
            if error is None:
                raise
            log.error("while the loop's own exception passes: %s", failed)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("the Checkpointer is closed; make a new one")

    # -- figures -----------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device whose state is saved."""
        return self._device

    @property
    def engine(self) -> Engine | None:
        """The strategy at work (figures and experiments; None for ``none``)."""
        return self._engine

    @property
    def client(self) -> AgentClient | None:
        """The connection to the agent (figures and experiments; None for ``none``)."""
        return self._client


def open(path: str | Path, step: int | None = None) -> Checkpoint:
    """Read a checkpoint without a model; see :class:`gockpt.Checkpoint`.

    Args:
        path: a directory of checkpoints (then the newest valid one, or that of ``step``), or one
            checkpoint's own directory.

    Raises:
        NoCheckpointError: there is none.
        CorruptError: ``path`` is a checkpoint, and damaged.
    """
    return open_checkpoint(path, step)


def _check_arguments(
    *, every: int | None, keep: int | None, windows: int | None, slots: int, share: float
) -> None:
    for name, value in (("every", every), ("keep", keep), ("windows", windows)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name} must be a whole number, not {value!r}")
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if slots < 2:
        raise ConfigError("slots must be at least 2: one is filled while the other is kept")
    if not 0 < share <= 1:
        raise ConfigError(f"link_share must be above 0 and at most 1, not {share}")


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}")


def _check_world() -> None:
    if platform.system() == "Windows":
        raise ConfigError("Windows is not supported; use WSL 2")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise ConfigError(f"world size {size} is not supported yet; run one rank")


def _named(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return {"": optimizer}
    if not optimizer or any(not key or "." in key for key in optimizer):
        raise ConfigError("several optimizers need names without dots: {'name': optimizer, …}")
    return dict(optimizer)


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _device(device: Device | str | None, model: nn.Module) -> tuple[Device, bool]:
    if device is None:
        found = next((p.device for p in model.parameters()), torch.device("cpu"))
        device = str(found) if found.type != "cpu" else "cpu"
    if isinstance(device, str):
        return open_device(device), True
    return device, False


def _warn_of_missing(
    optimizers: Mapping[str, torch.optim.Optimizer], extras: Mapping[str, Any]
) -> None:
    """A scheduler leaves its mark on ``optimizer.step``; without it in extras, lr starts anew."""
    scheduled = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers.values())
    kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if scheduled and not any(isinstance(extra, kinds) for extra in extras.values()):
        log.warning(
            "a learning-rate scheduler is in use but not in extras: it will not be restored"
        )
