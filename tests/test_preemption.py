"""Stopped by a signal: the pass at which it came is the one that is saved, wherever it came.

The signals are real ones, sent to this process or to one of its own. Where something must be slow
it is held by a fault point.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import Bag, assert_same, checkpointer, one_pass, open_device, truth
from torch import nn

import gockpt
from gockpt import faults, signals
from gockpt.faults import Fault
from gockpt.signals import StopSignals
from gockpt.storage.lock import holder

DEADLINE = 200.0
BASE, TARGET = 5, 8
"""Of the second checkpoint, with four windows: they open after these passes and between them."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM), list(signals._listening)
    yield
    faults.disarm()
    assert (signal.getsignal(signal.SIGTERM), list(signals._listening)) == before


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def loop(
    ckpt: gockpt.Checkpointer,
    training: Bag,
    last: int,
    during: Callable[[int], None] = lambda step: None,
) -> None:
    """The loop that the documentation shows; ``during`` is called in the middle of each pass."""
    while ckpt.current_step < last and not ckpt.should_stop:
        step = ckpt.current_step + 1
        with ckpt.device.phase("forward", step):
            training.compute(step)
        during(step)
        with ckpt.device.phase("update", step):
            training.update(step)
        ckpt.step()


def at(pass_: int, act: Callable[[], None] = terminate) -> Callable[[int], None]:
    """Do it in this pass."""

    def during(step: int) -> None:
        if step == pass_:
            act()

    return during


def steps_of(path: Path) -> list[int]:
    return sorted(gockpt.open(one).step for one in path.glob("step-*"))


@pytest.fixture(scope="module")
def unbroken() -> dict[int, Any]:
    """The truth after each pass of a run that was never stopped."""
    training, moments = Bag(), {}
    for step in range(1, 13):
        training.compute(step)
        training.update(step)
        moments[step] = truth(training)
    return moments


# -- wherever it comes -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("stop", range(BASE - 1, TARGET + 2))
def test_the_pass_in_which_it_comes_is_saved_and_gone_on_from(
    device: str, stop: int, unbroken: dict[int, Any], tmp_path: Path
) -> None:
    """At the first target, at the next base, inside the windows, at the target, right after it."""
    training = Bag()
    with (
        open_device(device) as opened,
        checkpointer(training, tmp_path, every=4, windows=4, device=opened) as ckpt,
    ):
        loop(ckpt, training, 12, at(stop))
        assert ckpt.should_stop
        assert ckpt.current_step == ckpt.latest == stop  # durable already here
        assert_same(truth(training), unbroken[stop], "training is unharmed")
    found = gockpt.open(tmp_path)
    assert found.verify() == []
    assert found.info.proof["outcome"] == "exact"
    assert_same(found.load(), unbroken[stop], "saved")
    assert found.info.windows == (stop - 1) % 4 + 1
    again = Bag(3)
    with checkpointer(again, tmp_path, every=4, windows=4) as ckpt:
        ckpt.restore()
        loop(ckpt, again, 12)
        assert not ckpt.should_stop
        assert_same(truth(again), unbroken[12], "continued")


@pytest.mark.parametrize("strategy", ["sync", "async", "async-o", "gockpt-paper", "gockpt"])
def test_every_strategy_saves_the_last_pass(
    strategy: str, unbroken: dict[int, Any], tmp_path: Path
) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, strategy=strategy) as ckpt:
        loop(ckpt, training, 12, at(6))
    assert_same(gockpt.open(tmp_path).load(), unbroken[6], strategy)
    assert steps_of(tmp_path) == [4, 6]


def test_without_a_strategy_the_loop_stops_all_the_same(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, strategy="none") as ckpt:
        loop(ckpt, training, 12, at(6))
        assert ckpt.should_stop
    assert ckpt.current_step == 6


def test_between_two_passes_it_is_the_next_one_that_is_saved(tmp_path: Path) -> None:
    """What is between ``step()`` and a look at ``should_stop`` cannot be lost."""
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        loop(ckpt, training, 6)
        terminate()
        assert not ckpt.should_stop
        loop(ckpt, training, 12)
        assert ckpt.should_stop
    assert steps_of(tmp_path) == [4, 7]


def test_before_the_first_pass_it_is_the_first_one_that_is_saved(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        terminate()
        ckpt.restore()
        loop(ckpt, training, 12)
    assert steps_of(tmp_path) == [1]


def test_a_micro_batch_is_no_pass(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        terminate()
        training.compute(1)
        ckpt.step()
        assert not ckpt.should_stop
        loop(ckpt, training, 12)
    assert steps_of(tmp_path) == [1]


def test_a_save_that_was_asked_for_is_this_one(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=4) as ckpt:
        loop(ckpt, training, 1)
        handle = ckpt.save()
        assert handle.step == 5
        terminate()
        loop(ckpt, training, 12)
        assert handle.done()
        assert handle.step == 2
        assert ckpt.save() is not handle


def test_a_loop_that_goes_on_is_saved_as_planned(unbroken: dict[int, Any], tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        for step in range(1, 13):
            at(6)(step)
            one_pass(ckpt, training, step)
            ckpt.step()
            assert ckpt.should_stop == (step >= 6)
    assert steps_of(tmp_path) == [4, 6, 8, 12]
    for step in (4, 6, 8, 12):
        found = gockpt.open(tmp_path, step)
        assert_same(found.load(), unbroken[step], f"step {step}")
        assert found.info.fallback is None


# -- within the grace time -------------------------------------------------------------------------


class Frozen(Bag):
    """With several extents of weights that nothing trains: final before all else is."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        weights = torch.full((3 << 20,), float(seed))
        self.bag.register_parameter("frozen", nn.Parameter(weights, requires_grad=False))


@pytest.mark.parametrize("pass_", [6, 7])
def test_files_begun_before_the_seal_bear_the_step_that_is_saved(
    pass_: int, tmp_path: Path
) -> None:
    """The agent writes what is final at once, and names the directory when it does."""
    training = Frozen()
    with checkpointer(training, tmp_path, every=8, windows=4) as ckpt:
        loop(ckpt, training, 12, at(pass_))
        assert (ckpt.should_stop, ckpt.latest) == (True, pass_)
    assert_same(gockpt.open(tmp_path).load(), truth(training), "stopped early")


def slow_commit(seconds: float, *, after: int = 0, times: int = 1) -> Fault:
    return Fault(point="output.written", action=f"delay:{seconds}", after=after, times=times)


def test_earlier_checkpoints_are_waited_for_too(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
        faults.arm([slow_commit(0.5)])
        loop(ckpt, training, 12, at(3))
        assert steps_of(tmp_path) == [2, 3]


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_slot_is_waited_for_even_where_busy_ones_are_skipped(
    when_busy: str, tmp_path: Path
) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1, when_busy=when_busy) as ckpt:
        faults.arm([slow_commit(0.5)])
        loop(ckpt, training, 12, at(3))
        assert ckpt.latest == 3


def test_a_grace_time_that_is_too_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unbroken: dict[int, Any]
) -> None:
    """The older one stands and a line says so; the agent is left to finish, and does."""
    training = Bag()
    slow = slow_commit(2, after=1)
    arguments = {"agent": "process", "faults": [slow], "grace": 0.5}
    with checkpointer(training, tmp_path, every=4, windows=4, **arguments) as ckpt:
        loop(ckpt, training, 5)
        ckpt.wait(DEADLINE)
        loop(ckpt, training, 12, at(6))
        assert ckpt.should_stop
        assert ckpt.latest == 4
        agent = holder(tmp_path / ".gockpt" / "rank-00000.lock")["pid"]
    assert [line for line in caplog.messages if "SIGTERM" in line] == [
        "stopped by SIGTERM at step 6, but its checkpoint needs more than the 0.5 s of grace; "
        "the newest one is of step 4"
    ]
    assert isinstance(agent, int)
    assert os.waitpid(agent, 0)[1] == 0
    assert_same(gockpt.open(tmp_path).load(), unbroken[6], "written all the same")


def test_no_slot_within_the_grace_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=1, windows=1, grace=0.1) as ckpt:
        faults.arm([slow_commit(0.6, times=2)])
        loop(ckpt, training, 12, at(3))
        assert ckpt.should_stop
        assert ckpt.latest is None
    assert "stopped by SIGTERM at step 3, but its checkpoint" in caplog.text
    assert "there is no older one" in caplog.text


def test_a_pass_that_took_longer_than_the_grace_time(tmp_path: Path) -> None:
    """It is handed to the agent, but not waited for."""
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4, grace=0) as ckpt:
        faults.arm([slow_commit(0.3)])
        loop(ckpt, training, 12, at(6))
        client = ckpt.client
        assert ckpt.should_stop
        assert client is not None
        client.wait_for(client.drained, DEADLINE, "both")
        assert ckpt.latest == 6


def test_a_checkpoint_that_fails_is_raised_and_the_loop_may_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        loop(ckpt, training, 5)
        ckpt.wait(DEADLINE)
        faults.arm([Fault(point="fs.create", action="errno:ENOSPC", times=0)])
        with pytest.raises(gockpt.SpaceError):
            loop(ckpt, training, 12, at(6))
        assert ckpt.should_stop
        assert (ckpt.current_step, ckpt.latest) == (6, 4)
    assert "at step 6, but its checkpoint failed; the newest one is of step 4" in caplog.text


# -- at the end ------------------------------------------------------------------------------------


def test_while_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last commit is finished; the signal has come too late to mean anything."""
    from gockpt.agent import output

    real, sent = output.commit, []

    def commit(*args: Any, **kwargs: Any) -> Any:
        if not sent:
            sent.append(threading.current_thread().name)
            terminate()
        return real(*args, **kwargs)

    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=4, windows=4)
    loop(ckpt, training, 6)
    ckpt.wait(DEADLINE)
    monkeypatch.setattr(output, "commit", commit)
    ckpt.close()
    assert sent == ["gockpt-commit"]
    assert steps_of(tmp_path) == [4, 6]


class Quit(BaseException):
    """What a user's own handler raises."""


@pytest.fixture
def own_handler() -> Iterator[list[Any]]:
    """A handler that is there before; it does what the list's first element says."""
    acts: list[Any] = [lambda: None]
    default = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: Any) -> None:
        acts.append(number)
        acts[0]()

    signal.signal(signal.SIGTERM, handler)
    yield acts
    signal.signal(signal.SIGTERM, default)


def raise_quit() -> None:
    raise Quit


def test_a_handler_that_ends_the_loop_itself(
    own_handler: list[Any], unbroken: dict[int, Any], tmp_path: Path
) -> None:
    """Between two passes what stands is that of the last one; closing saves it."""
    own_handler[0] = raise_quit
    training = Bag()
    with (
        pytest.raises(Quit),
        checkpointer(training, tmp_path, every=4, windows=2) as ckpt,
    ):
        loop(ckpt, training, 12, at(6))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert ckpt.should_stop
    assert_same(gockpt.open(tmp_path).load(), unbroken[5], "the last whole pass")


def test_in_the_middle_of_an_update_nothing_is_saved(
    own_handler: list[Any], tmp_path: Path
) -> None:
    own_handler[0] = raise_quit
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=4, windows=4)
    loop(ckpt, training, 5)
    one_pass(ckpt, training, 6)
    with pytest.raises(Quit):
        terminate()
    ckpt.close()
    assert steps_of(tmp_path) == [4]


# -- handlers --------------------------------------------------------------------------------------


def test_the_handler_that_was_there_is_called_and_put_back(
    own_handler: list[Any], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4) as ckpt:
        loop(ckpt, training, 12, at(6))
        assert own_handler[1:] == [signal.SIGTERM]
        terminate()  # sent again, as launchers do
        assert own_handler[1:] == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
    terminate()
    assert len(own_handler) == 3


def test_a_later_signal_acts_as_it_did_before(
    own_handler: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "REPEATED", -1.0)
    stop = listening("SIGTERM")
    terminate()
    first = stop.received
    terminate()
    assert (len(own_handler) - 1, stop.received) == (2, first)
    stop.close()


def listening(*names: str) -> StopSignals:
    stop = StopSignals(names)
    stop.listen()
    return stop


def ends_by(act: Callable[[], None], *, fork: Callable[[], int] = os.fork) -> int:
    """What ended a forked child that does this: a signal, or 0 for none."""
    pid = fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_a_later_signal_ends_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def later() -> None:
        listening("SIGTERM")
        terminate()
        terminate()
        monkeypatch.setattr(signals, "REPEATED", -1.0)
        terminate()

    def at_once() -> None:
        listening("SIGTERM")
        terminate()
        terminate()

    assert ends_by(later) == signal.SIGTERM
    assert ends_by(at_once) == 0


def test_a_second_interrupt_is_one() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    stop = listening("SIGINT")
    with contextlib.closing(stop):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.name == "SIGINT"
        assert stop.received is not None
        stop.received -= 60
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_ignored_stays_ignored(caplog: pytest.LogCaptureFixture) -> None:
    def ignored() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = listening("SIGTERM")
        terminate()
        if stop.received is not None or signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ends_by(ignored) == 0


def c_fork() -> int:
    """A fork that Python does not know of."""
    import ctypes

    return int(ctypes.PyDLL(None).fork())


@pytest.mark.parametrize("fork", [os.fork, c_fork])
def test_a_forked_worker_dies_as_it_would_without_us(fork: Callable[[], int]) -> None:
    with contextlib.closing(listening("SIGTERM")) as stop:
        assert ends_by(terminate, fork=fork) == signal.SIGTERM
        assert stop.received is None
        terminate()
        assert stop.received is not None


def test_a_forked_worker_keeps_the_users_own_handler(own_handler: list[Any]) -> None:
    own_handler[0] = lambda: os._exit(0) if len(own_handler) == 2 else None
    with contextlib.closing(listening("SIGTERM")):
        assert ends_by(lambda: (terminate(), os.abort())) == 0  # type: ignore[arg-type]
    assert len(own_handler) == 1


def test_workers_of_a_loader_end_when_they_are_told_to(tmp_path: Path) -> None:
    import multiprocessing

    with checkpointer(Bag(), tmp_path, every=4) as ckpt:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(DEADLINE,))
        worker.start()
        worker.terminate()
        worker.join(DEADLINE)
        assert worker.exitcode == -signal.SIGTERM
        assert not ckpt.should_stop


def test_two_of_them_hear_it_and_may_be_closed_in_any_order(tmp_path: Path) -> None:
    trainings = [Bag(1), Bag(2)]
    one, two = (
        checkpointer(training, tmp_path / str(number), every=4)
        for number, training in enumerate(trainings)
    )
    terminate()
    for ckpt, training in zip((one, two), trainings, strict=True):
        loop(ckpt, training, 2)
        assert (ckpt.should_stop, ckpt.current_step) == (True, 1)
    one.close()
    two.close()

    def close_the_first() -> None:
        first, second = listening("SIGTERM"), listening("SIGTERM")
        first.close()
        terminate()  # held back by the second, though the first's handler comes after its own
        if second.received is None:
            os.kill(os.getpid(), signal.SIGKILL)
        second.close()
        terminate()

    assert ends_by(close_the_first) == signal.SIGTERM


def test_made_on_another_thread_nothing_is_handled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def train() -> None:
        training = Bag()
        with checkpointer(training, tmp_path, every=2, windows=1) as ckpt:
            loop(ckpt, training, 4)
            found.append(signal.getsignal(signal.SIGTERM))

    with caplog.at_level(logging.INFO, "gockpt"):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(DEADLINE)
    assert found == [before]
    assert "not on the main thread: SIGTERM will not stop the training" in caplog.text
    assert steps_of(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop_signals": ["TERM"]}, "'TERM' cannot be handled"),
        ({"stop_signals": ["SIGKILL"]}, "'SIGKILL' cannot be handled"),
        ({"stop_signals": "SIGTERM"}, r"\('SIGTERM',\)"),
        ({"grace": -1}, "grace must be a number of seconds, not -1"),
        ({"grace": float("inf")}, "grace"),
        ({"grace": None}, "grace"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(gockpt.ConfigError, match=message):
        checkpointer(Bag(), tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_nothing_is_handled_if_nothing_shall_be(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with checkpointer(Bag(), tmp_path, stop_signals=()):
        assert signal.getsignal(signal.SIGTERM) == before


# -- the agent -------------------------------------------------------------------------------------


def test_an_agent_that_gets_it_too_finishes_its_work(
    unbroken: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the whole container: at its start, while it is idle, inside the windows, at the end."""
    from gockpt.agent import client, launch

    started = []

    def start(mode: Any, log: Path) -> Any:
        running = launch.start(mode, log)
        started.append(running.pid)  # type: ignore[attr-defined]
        os.kill(started[-1], signal.SIGTERM)
        return running

    monkeypatch.setattr(client, "start", start)

    def both() -> None:
        os.kill(started[0], signal.SIGTERM)
        if step == 6:
            terminate()

    training = Bag()
    with checkpointer(training, tmp_path, every=4, windows=4, agent="process") as ckpt:
        for step in (1, 3, 6):
            loop(ckpt, training, step, at(step, both))
        assert ckpt.should_stop
        assert ckpt.latest == 6
        assert holder(tmp_path / ".gockpt" / "rank-00000.lock")["pid"] == started[0]
    assert len(started) == 1
    assert_same(gockpt.open(tmp_path).load(), unbroken[6], "saved")
