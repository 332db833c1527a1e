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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gockpt import exits, recall, strategies
from gockpt import restore as restoring
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Handle
from gockpt.agent.launch import AgentMode
from gockpt.agent.ownership import started
from gockpt.agent.protocol import PROTOCOL, Hello, Pace
from gockpt.agent.rendezvous import meeting_place
from gockpt.devices import Device, open_device
from gockpt.errors import ConfigError, GockptError, LockedError
from gockpt.extras import Extras
from gockpt.faults import Fault
from gockpt.hooks import Hooks
from gockpt.preemption import Preemption
from gockpt.restore import Restored
from gockpt.storage import Checkpoint, Tier, fs, pin, scan
from gockpt.storage import open as open_checkpoint
from gockpt.strategies import turns
from gockpt.strategies.engine import Engine, OnError, Settings, WhenBusy
from gockpt.strategies.memory import Memory

log = logging.getLogger("gockpt")

MAX_VOLUMES = 64
"""Most directories that one rank's image is divided over."""

REPLAY_PER_THREAD = 0.8e9
"""Parameter updates a second and thread of a fused replay, until a real one has been measured."""


class Checkpointer:
    """Saves the state of a training loop every so many steps, without stopping it.

    Used as a context manager around the loop, with :meth:`step` at the end of every pass::

        with gockpt.Checkpointer(model, optimizer, "checkpoints/", every=100) as ckpt:
            ckpt.restore()
            while ckpt.current_step < total_steps and not ckpt.should_stop:
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
        keep_every: int | None = None,
        tier: Tier | str | Path | None = None,
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
        stop_signals: Sequence[str] = ("SIGTERM",),
        grace: float = 25.0,
        linger: float = 60.0,
        pace: Pace | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Start the agent and allocate all memory; the directory is locked from here on.

        Args:
            optimizer: one, or a dictionary of several by name.
            path: directory of the checkpoints, made if it is not there.
            every: steps between checkpoints; None: only where :meth:`save` is called.
            strategy: a name of :data:`gockpt.strategies.POLICIES`.
            keep: how many checkpoints stay; None: all. Older ones stay if they are pinned
                (:meth:`pin`) or were restored from.
            keep_every: checkpoints taken at multiples of so many steps stay for ever.
            tier: a second, slower directory (NFS, another disk) that checkpoints are copied to
                behind the training, or a :class:`gockpt.Tier` that says more. :meth:`restore` falls
                back to it.
            extras: further objects with ``state_dict`` and ``load_state_dict``, by name: scheduler,
                scaler, data loader. The random generators are always included.
            volumes: directories, each on a disk of its own, that every checkpoint is divided over
                evenly and written to in parallel; made if they are not there. ``path`` then holds
                the manifests only. Older checkpoints are found on volumes that were mounted
                elsewhere when they were written, too.
            windows: forces the number of windows (for tests and experiments).
            link_share: share of the link to the host that may be used.
            proof: compare each checkpoint with the true state before it is committed.
            require_exact: refuse checkpoints whose proof is only ``close`` (on CUDA).
            when_busy: what to do if a checkpoint is due and no slot is free: wait, or skip it.
            on_error: raise what a checkpoint failed with at the next :meth:`step`, or warn.
            agent: as a process of its own, or as a thread of this one.
            device: a device or its name; None: the accelerator that the state is on, else the
                CPU. Some of it may be on the CPU beside an accelerator, but not on a second one.
            slots: checkpoints in host memory at a time.
            close_timeout: seconds that :meth:`close` gives the last writes.
            stop_signals: names of the signals that end the loop, see :attr:`should_stop`. They are
                handled until :meth:`close`, if this is made on the main thread and they are not
                ignored; a handler of your own is called as well.
            grace: seconds from the signal in which the last checkpoint must be written. Those who
                send it usually kill after 30.
            linger: seconds that the agent, when this process has died, keeps the newest checkpoint
                in memory for one that is started again; 0: it leaves as soon as all is written.
            pace: modelled rates of the host, for the emulated accelerator.
            faults: fault points to arm in the agent, for tests.

        Raises:
            ConfigError: arguments that cannot be used.
            StateError: state that cannot be saved.
            LockedError: another process uses the directory, or its tier.
            AgentError: the agent cannot be started, or does not answer.
            StorageError: only the tier could tell what there is, and it does not answer.
        """
        _check_arguments(every=every, keep=keep, windows=windows, slots=slots, share=link_share)
        _check_counts(keep_every=keep_every)
        if not 0 <= linger < float("inf"):
            raise ConfigError(f"linger must be a number of seconds from 0 on, not {linger}")
        _check_choice("when_busy", when_busy, get_args(WhenBusy))
        _check_choice("on_error", on_error, get_args(OnError))
        _check_choice("agent", agent, get_args(AgentMode))
        places = _volumes(volumes)
        _check_world()
        policy = strategies.policy(strategy)
        optimizers = _named(optimizer)
        self._model = model
        home = _home(model, optimizers)
        self._device, self._owns_device = _device(device, home)
        device_type = home.type
        self._extras = Extras(extras, device_type=device_type)
        self._root = Path(path)
        self._tier = _tier(tier, self._root)
        self._timeout = close_timeout
        self._closed = False
        self._engine: Engine | None = None
        self._client: AgentClient | None = None
        self._hooks: Hooks | None = None
        self._switching = sys.getswitchinterval()
        self._step_without_engine = 0
        self._saves = policy.saves
        self._preemption = Preemption(stop_signals, grace)
        _warn_of_missing(optimizers, extras or {})
        if not policy.saves:
            self._preemption.signals.listen()
            return
        _check_directory(self._root)
        self._extras.check()
        launch = secrets.token_hex(4)
        threads = torch.get_num_threads()
        mode = _mode(agent)
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
            trainer=os.getpid(),
            started=started(os.getpid()),
            linger=linger,
            meeting=str(meeting_place()) if mode == "process" else None,
            faults=list(faults),
            keep_every=keep_every,
            tier=self._tier,
            volumes=[str(place) for place in places],
        )
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
                    write_rate=pace.write * max(1, len(places)) if pace and pace.write else None,
                ),
            )
            _warn_of_room(places or [self._root], self._engine.memory)
            self._hooks = Hooks(model, optimizers, extras or {}, self._engine)
            turns.share()
            self._process = os.getpid()
            atexit.register(self._at_exit)
            self._preemption.signals.listen()
            _open.add(self)
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
        preemption = self._preemption
        if self._engine is None or self._client is None or self._hooks is None:
            self._step_without_engine += 1
            preemption.should_stop = preemption.pending or preemption.should_stop
            return
        if stopping := preemption.pending:
            self._engine.stop(preemption.deadline)
        if not self._engine.resting:
            self._hooks.order()
        if self._engine.end_pass() and stopping:
            preemption.settle(self._client, self._root, self.current_step)
            self._engine.stop(None)
            self._engine.raise_errors()

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
            TimeoutError: not after ``timeout`` seconds (None: those of ``close_timeout``).
            GockptError: what one of them failed with (``on_error="raise"``).
        """
        if self._client is not None:
            self._settle(self._client.idle, timeout)

    def _settle(self, reached: Callable[[int | None], bool], timeout: float | None) -> None:
        """Wait until all checkpoints but an open one have ``reached`` a state, or have failed."""
        if self._engine is None or self._client is None:
            return
        self._engine.settle()
        client, engine = self._client, self._engine
        try:
            limit = self._timeout if timeout is None else timeout
            client.wait_for(lambda: reached(engine.open_sequence), limit, "earlier checkpoints")
        except GockptError as error:
            if not reached(engine.open_sequence):
                raise TimeoutError(str(error)) from error
            raise
        engine.raise_errors()

    @property
    def latest(self) -> int | None:
        """Step of the newest valid checkpoint of the directory, or None."""
        return next((one.step for one in scan(self._root) if one.problem is None), None)

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end, because a stop signal came.

        Set by the first :meth:`step` after the signal. That pass is saved at once, whatever was
        planned: an open checkpoint with all that it lacks, else a new one. It is set when this and
        all earlier ones are durable, or when the grace time is over; a log line says which.
        """
        return self._preemption.should_stop

    def restore(self, step: int | None = None) -> Restored | None:
        """Put the newest valid checkpoint (or that of ``step``) back into model, optimizers,
        extras.

        It is taken from the agent's memory where that is as new as the disk. Every byte is checked
        while it is read; a damaged checkpoint is reported and the next older one used, be it in the
        directory or in its tier.

        Returns:
            What was restored, or None where the directory has no checkpoints.

        Raises:
            NoCheckpointError: ``step`` is not there, or nothing that is there is valid.
            StateError: the checkpoint does not fit the model.
        """
        self._check_open()
        began = time.monotonic()
        loaded = None
        if self._engine is not None and self._client is not None:
            self._engine.abort("a checkpoint was restored")
            self._settle(self._client.proved, None)
            tier = None if self._tier is None else Path(self._tier.path)
            loaded = recall.load(self._client, self._root, tier, step, self.wait)
        elif step is not None or scan(self._root):
            raise ConfigError("strategy 'none' restores nothing; choose another one")
        if loaded is None:
            log.info("%s has no checkpoints: a fresh start", self._root)
            return None
        for problem in loaded.problems:
            log.warning("not restored: %s", problem)
        read = time.monotonic()
        checkpoint = loaded.checkpoint
        self._apply(loaded)
        ended = time.monotonic()
        restored = Restored(
            step=checkpoint.step,
            path=checkpoint.path,
            source=loaded.source,
            problems=loaded.problems,
            proof=str(checkpoint.info.proof.get("outcome", "off")),
            seconds=ended - began,
            read_seconds=read - began,
            apply_seconds=ended - read,
        )
        log.info(
            "restored step %d of %s from %s (proof: %s)",
            restored.step,
            restored.path,
            restored.source,
            restored.proof,
        )
        return restored

    def pin(self, step: int) -> None:
        """Keep the newest valid checkpoint of ``step`` for ever, in the directory and in its tier.

        Makes one small file, on the calling thread. ``gockpt unpin`` takes it back.

        Raises:
            NoCheckpointError: there is none (wait for its handle first).
        """
        pin(self._root, step)

    def _apply(self, loaded: recall.Loaded) -> None:
        engine, client = self._engine, self._client
        if engine is None or client is None:
            return
        checkpoint, tensors = loaded.checkpoint, loaded.tensors
        engine.refresh()
        put_back = self._extras.prepare(restoring.extras_of(checkpoint.extras), tensors)
        restoring.apply(engine.inventory, self._model, tensors, checkpoint.groups)
        put_back()
        client.protect(checkpoint.path)
        engine.restored(checkpoint.step)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Copy what an open checkpoint still lacks, wait for all writes, end the agent.

        While an exception passes (in a ``finally``, at the end of a ``with``) an open checkpoint is
        dropped instead: the pass that was interrupted is in no state that could be gone on from.
        Waits for the newest checkpoint to reach the tier as well, unless that is stuck.

        Raises:
            GockptError: what a checkpoint failed with, or that the newest one did not reach the
                tier (``on_error="raise"``).
        """
        self._shut(broken=sys.exc_info()[0] is not None)

    def _shut(self, *, broken: bool) -> None:
        """Close; ``broken`` is whether an exception may have ended the loop."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        atexit.unregister(self._at_exit)
        sys.setswitchinterval(self._switching)
        failure: BaseException | None = None
        if self._hooks is not None:
            self._hooks.remove()
        if self._engine is not None and self._client is not None:
            preemption = self._preemption
            if stopping := preemption.pending:
                self._engine.stop(preemption.deadline)
            try:
                if broken and not stopping:
                    # Who knows in which part of a pass it was raised: the data position and the
                    # generators may have moved on already.
                    self._engine.abort("an exception ended the loop")
                self._engine.finish()
            except GockptError as error:
                failure = error
            if stopping:
                preemption.settle(self._client, self._root, self.current_step)
            try:
                self._client.close(preemption.patience(self._timeout), leave=preemption.should_stop)
            except GockptError as error:
                failure = failure or error
            self._engine.close()
            try:
                self._engine.raise_errors()
            except GockptError as error:  # the first cause; the other is that of its own delay
                if failure is not None:
                    log.error("%s", failure)
                failure = error
        if self._owns_device:
            self._device.close()
        self._preemption.signals.close()
        if failure is not None:
            raise failure

    def _at_exit(self) -> None:
        """A script that ends without :meth:`close` still gets its last checkpoint written."""
        if os.getpid() != self._process:
            return  # a fork of the trainer: the agent is not its own
        try:
            self._shut(broken=getattr(sys, "last_type", None) is not None)
        except GockptError as error:
            log.error("at exit: %s", error)
            exits.report(error)

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


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Those of this process that have locked their directory."""


def open(
    path: str | Path, step: int | None = None, *, volumes: Sequence[str | Path] = ()
) -> Checkpoint:
    """Read a checkpoint without a model; see :class:`gockpt.Checkpoint`.

    Args:
        path: a directory of checkpoints (then the newest valid one, or that of ``step``), or one
            checkpoint's own directory.
        volumes: where parts of it may be that are no longer on the volumes they were written to.

    Raises:
        NoCheckpointError: there is none.
        CorruptError: ``path`` is a checkpoint, and damaged.
    """
    return open_checkpoint(path, step, volumes=[Path(one) for one in volumes])


def _check_arguments(
    *, every: int | None, keep: int | None, windows: int | None, slots: int, share: float
) -> None:
    _check_counts(every=every, keep=keep, windows=windows)
    if slots < 2:
        raise ConfigError("slots must be at least 2: one is filled while the other is kept")
    if not 0 < share <= 1:
        raise ConfigError(f"link_share must be above 0 and at most 1, not {share}")


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"{name} must be a whole number, not {value!r}")
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")


def _tier(tier: Tier | str | Path | None, root: Path) -> Tier | None:
    if tier is None:
        return None
    return (tier if isinstance(tier, Tier) else Tier(str(tier))).check(root)


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}")


def _volumes(given: Sequence[str | Path]) -> list[Path]:
    if isinstance(given, str | Path):
        raise ConfigError(f"volumes must be a list of directories; write [{str(given)!r}]")
    found = [Path(one).resolve() for one in given]
    twice = [one for one in found if found.count(one) > 1]
    if twice:
        raise ConfigError(f"the volume {twice[0]} is named twice; name each disk once")
    if len(found) > MAX_VOLUMES:
        raise ConfigError(f"{len(found)} volumes are more than {MAX_VOLUMES}; use fewer")
    return found


def _warn_of_room(places: Sequence[Path], memory: Memory) -> None:
    """Room may still be made, so training begins; but who looks at the log now can save a run."""
    need = memory.header + memory.slot // len(places)
    for place in places:
        if (free := fs.free_bytes(place)) < need:
            log.warning(
                "%s has %.1f GB free, and a checkpoint needs %.1f GB there; free some room",
                place,
                free / 1e9,
                need / 1e9,
            )


def _check_world() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise ConfigError(f"world size {size} is not supported yet; run one rank")


def _mode(wanted: AgentMode) -> AgentMode:
    if wanted == "process" and platform.system() != "Linux":
        log.info("the agent is a thread of this process: one of its own needs Linux")
        return "thread"
    return wanted


def _check_directory(root: Path) -> None:
    for other in list(_open):
        if other._process == os.getpid() and other._root.resolve() == root.resolve():
            raise LockedError(
                f"{root} is in use by another Checkpointer of this process; close it first, or use "
                "another directory"
            )


def _named(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
) -> dict[str, torch.optim.Optimizer]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return {"": optimizer}
    if not optimizer or any(not key or "." in key for key in optimizer):
        raise ConfigError("several optimizers need names without dots: {'name': optimizer, …}")
    return dict(optimizer)


def _home(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.device:
    """The accelerator that the state is on, or the CPU where it is on none.

    Raises:
        ConfigError: it is on several. One copy stream serves one device; what is on the others
            would be found missing in the middle of a checkpoint, or not at all.
    """
    places = dict.fromkeys(tensor.device for tensor in _state(model, optimizers))
    found = [place for place in places if place.type not in ("cpu", "meta")]
    if len(found) > 1:
        raise ConfigError(
            f"the model and its optimizer are on {found[0]} and on {found[1]}, but a Checkpointer "
            "saves one device; keep them on one, with one process per device"
        )
    first = next((param.device for param in model.parameters()), torch.device("cpu"))
    return found[0] if found else first


def _state(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[Tensor]:
    """All tensors of model and optimizers that there are by now."""
    yield from model.parameters()
    yield from model.buffers()
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _device(device: Device | str | None, home: torch.device) -> tuple[Device, bool]:
    if device is None:
        device = str(home) if home.type != "cpu" else "cpu"
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
