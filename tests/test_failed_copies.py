"""Copies that fail on the device, or are of no use: a checkpoint is lost at most, not the training.

The user's ``optimizer.step()`` never raises what only the checkpoint suffers from, and the ring of
gradients gets back what was put into it for nobody.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from identity_kit import (
    Bag,
    assert_same,
    check,
    checkpointer,
    one_pass,
    open_device,
    run,
    truth,
)
from replay_kit import maker
from test_identity_training import Scaled

import gockpt
from gockpt.agent.client import AgentClient
from gockpt.agent.handle import Stage
from gockpt.devices import Device
from gockpt.errors import DeviceError
from gockpt.faults import Fault

DEADLINE = 200.0
LANES = ("state", "gradients", "proof")


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("emulated") as opened:
        yield opened


def fail(
    device: Device, lane: str, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the copies of a lane fail in these passes, as the device does when it has no memory."""
    copy = device.copy

    def out_of_memory() -> Any:
        raise torch.OutOfMemoryError("out of memory")

    def failing(pairs: Any, *, lane: str, step: int, **more: Any) -> Any:
        fails = lane == wanted and step in steps
        return copy(out_of_memory if fails else pairs, lane=lane, step=step, **more)

    wanted = lane
    monkeypatch.setattr(device, "copy", failing)


class Filling(Bag):
    """Writes zeros into its gradients, so that their copies are waited for before."""

    def update(self, step: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("make", [Bag, Filling])
@pytest.mark.parametrize("lane", LANES)
def test_a_copy_that_fails_costs_no_step(
    lane: str,
    make: Callable[..., Bag],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fail(device, lane, (7, 8), monkeypatch)
    training = make()
    ran = run(training, tmp_path, steps=24, every=8, windows=3, device=device, on_error="warn")
    check(ran, [16, 24], lambda: make(3))


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("lane", LANES)
def test_it_is_raised_where_the_user_expects_it(
    windows: int,
    lane: str,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By ``ckpt.step()``, which then goes on as if nothing had been; never by the update."""
    fail(device, lane, tuple(range(5, 9)), monkeypatch)
    training, raised = Bag(), []
    with checkpointer(training, tmp_path, every=8, windows=windows, device=device) as ckpt:
        for step in range(1, 17):
            one_pass(ckpt, training, step)
            try:
                ckpt.step()
            except gockpt.GockptError as error:
                raised.append(error)
        assert ckpt.current_step == 16
    assert all("failed" in str(error) for error in raised)
    assert raised or gockpt.open(tmp_path, 8).verify() == []
    assert gockpt.open(tmp_path).step == 16


def ring_of(ckpt: gockpt.Checkpointer) -> Any:
    client = ckpt.client
    assert isinstance(client, AgentClient)
    return client._shared.ring


class Zeroing(Bag):
    """Writes its gradients by hand, while they are on their way."""

    def update(self, step: int) -> None:
        self.optimizer.step()
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.zero_()


class Touching(Bag):
    """Writes its weights behind its optimizer's back, now and then in the first window."""

    def update(self, step: int) -> None:
        super().update(step)
        if step % 20 == 3:
            with torch.no_grad():
                next(self.model.parameters()).mul_(1)


@pytest.mark.parametrize("make", [Zeroing, Touching])
def test_what_was_sent_for_nobody_goes_back_to_the_ring(
    make: Callable[[], Bag], tmp_path: Path
) -> None:
    """Else a few such checkpoints fill it, and the next one waits for room that never comes.

    How many there are depends on when slots become free.
    """
    training = make()
    with (
        open_device("emulated", slowness=200_000) as device,
        checkpointer(
            training, tmp_path, every=4, windows=3, device=device, on_error="warn"
        ) as ckpt,
    ):
        engine = ckpt.engine
        assert engine is not None
        for step in range(1, 61):
            one_pass(ckpt, training, step)
            ckpt.step()
        ckpt.wait(DEADLINE)
        assert engine.events["fallbacks"] >= 1
        assert ring_of(ckpt).used == 0
        assert ckpt.latest == 60


def test_an_update_that_no_ring_can_hold_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, device: Device, tmp_path: Path
) -> None:
    from gockpt.strategies import memory

    needed = memory.Memory.needed

    def small(*args: Any, **more: Any) -> memory.Memory:
        import dataclasses

        made = needed(*args, **more)
        return dataclasses.replace(made, ring=made.ring // 8)

    monkeypatch.setattr(memory.Memory, "needed", small)
    ran = run(Bag(), tmp_path, steps=16, every=8, windows=4, device=device, on_error="warn")
    check(ran, [8, 16], lambda: Bag(3))
    assert "no room for its gradients" in (ran.infos[8].fallback or "")


# -- what is changed while the last window is open -------------------------------------------------


def spoil(training: Bag) -> None:
    with torch.no_grad():
        for param in training.model.parameters():
            param.add_(1)


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("how", ["wait", "close"])
def test_a_change_before_the_copies_have_ended_is_noticed_by_who_waits(
    how: str, windows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What had not been copied yet was wrong in the copy and in the proof alike."""
    training = Bag()
    with (
        open_device("emulated", slowness=200_000) as device,
        checkpointer(
            training, tmp_path, every=4, windows=windows, device=device, on_error="warn"
        ) as ckpt,
    ):
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            ckpt.step()
        spoil(training)
        ckpt.wait(DEADLINE) if how == "wait" else ckpt.close()
    assert "was changed" in caplog.text
    assert not list(tmp_path.glob("step-*"))


# -- who waits for a checkpoint is told, whatever becomes of it ------------------------------------


def test_what_was_asked_for_is_saved_when_the_training_is_closed_before(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=3) as ckpt:
        one_pass(ckpt, training, 1)
        ckpt.step()
        handle = ckpt.save()
        assert handle.step > 1
    handle.wait(DEADLINE)
    assert handle.step == gockpt.open(tmp_path).step == 1
    assert_same(gockpt.open(tmp_path).load(), truth(training), "asked for, and closed")


def test_what_was_asked_for_has_failed_when_an_exception_ends_the_loop(tmp_path: Path) -> None:
    training = Bag()
    ckpt = checkpointer(training, tmp_path, windows=3)
    one_pass(ckpt, training, 1)
    ckpt.step()
    handle = ckpt.save()

    def broken() -> None:
        with ckpt:
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with pytest.raises(gockpt.AgentError, match="an exception ended the loop"):
        handle.wait(DEADLINE)
    assert not list(tmp_path.glob("step-*"))


def test_what_was_asked_for_has_failed_when_another_state_is_restored(tmp_path: Path) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=3, every=2) as ckpt:
        for step in (1, 2):
            one_pass(ckpt, training, step)
            ckpt.step()
        ckpt.wait(DEADLINE)
        handle = ckpt.save()
        ckpt.restore()
        with pytest.raises(gockpt.AgentError, match="a checkpoint was restored"):
            handle.wait(DEADLINE)


def test_what_does_not_become_durable_in_time_has_failed_for_who_still_waits(
    tmp_path: Path,
) -> None:
    training = Bag()
    slow = Fault(point="output.written", action="delay:5")
    ckpt = checkpointer(
        training, tmp_path, windows=1, close_timeout=0.2, agent="process", faults=[slow]
    )
    one_pass(ckpt, training, 1)
    handle = ckpt.save()
    ckpt.step()
    with pytest.raises(gockpt.AgentError):
        ckpt.close()
    assert handle.stage is Stage.FAILED


class Failing:
    """An extra that can no longer tell its state."""

    def __init__(self) -> None:
        self.broken = False

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise RuntimeError("its workers are gone")
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize("windows", [1, 3])
def test_closing_does_not_wait_for_what_cannot_be_finished(windows: int, tmp_path: Path) -> None:
    training, extra, before = Bag(), Failing(), signal.getsignal(signal.SIGTERM)
    arguments = {"every": 4, "windows": windows, "agent": "process", "device": "cpu"}
    ckpt = checkpointer(training, tmp_path, extras={"loader": extra}, **arguments)
    for step in range(1, 4):
        one_pass(ckpt, training, step)
        ckpt.step()
    handle = ckpt.save()
    extra.broken = True
    with pytest.raises(gockpt.ExtrasError, match="its workers are gone"):
        ckpt.close()  # not a TimeoutError of this test, an hour long
    assert handle.stage is Stage.FAILED
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(DeviceError, match="closed"):
        ckpt.device.copy([], lane="state", step=0)


def test_state_that_appears_late_costs_a_checkpoint_and_no_slot(tmp_path: Path) -> None:
    """Momentum that is switched on in the middle: the image has no room for it yet."""
    training = Bag(make=maker("SGD", lr=0.1, fused=True))
    ran = run(training, tmp_path, steps=32, every=4, windows=3, on_error="warn", after=switch_on)
    check(ran, [24, 28, 32], None)


def switch_on(ckpt: gockpt.Checkpointer, training: Any, step: int) -> None:
    if step == 9:
        training.optimizer.param_groups[0]["momentum"] = 0.9


def test_a_checkpoint_that_cannot_be_begun_is_told_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = Bag()
    with checkpointer(training, tmp_path, windows=1, on_error="warn") as ckpt:
        engine = ckpt.engine
        assert engine is not None
        acquire = engine._acquire

        def fails(*, wait: bool) -> int | None:
            monkeypatch.setattr(engine, "_acquire", acquire)
            raise gockpt.AgentError("no slot became free")

        monkeypatch.setattr(engine, "_acquire", fails)
        handle = ckpt.save()
        for step in range(1, 4):
            one_pass(ckpt, training, step)
            ckpt.step()
        with pytest.raises(gockpt.AgentError, match="no slot became free"):
            handle.wait(DEADLINE)
        again = ckpt.save()
        one_pass(ckpt, training, 4)
        ckpt.step()
        assert again.wait(DEADLINE).name.startswith("step-000000004-")


@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.parametrize("windows", [1, 3])
def test_what_is_found_wrong_after_a_skipped_pass_is_not_taken_again(
    windows: int, every: int, tmp_path: Path
) -> None:
    """The target is over by then: the state is the same, but a loader or a generator is not."""
    training = Scaled(make=maker("AdamW", lr=0.1))  # a fused one is called all the same
    training.overflows = frozenset({9})
    with checkpointer(
        training, tmp_path, every=every, windows=windows, on_error="warn", extras=training.extras
    ) as ckpt:
        engine, client = ckpt.engine, ckpt.client
        assert engine is not None
        assert client is not None
        for step in range(1, 17):
            one_pass(ckpt, training, step)
            ckpt.step()
            if step == 8:
                assert engine._closing is not None
                client.problems[engine._closing.sequence] = "planted"
        ckpt.wait(DEADLINE)
        assert ckpt.current_step == 16
        assert engine.events["fallbacks"] == 1
    assert gockpt.open(tmp_path).step == 16
    assert_same(gockpt.open(tmp_path).load(), truth(training), "the last one")
    assert not list(tmp_path.glob("step-000000008-*"))
