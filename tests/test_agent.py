"""The agent: channels between it and the trainer, its death at every phase, and its end.

Both channels pass one conformance suite. Agents that are processes are really killed; training must
go on, and what they had proved must be committed all the same.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from identity_kit import (
    Bag,
    Ran,
    Training,
    assert_same,
    check,
    checkpointer,
    one_pass,
    run,
    truth,
)

import gockpt
from gockpt import faults, storage
from gockpt.agent import launch
from gockpt.agent.channel import Channel, ChannelClosed, QueueChannel, SocketChannel, pidfd
from gockpt.agent.client import MAX_RESTARTS, AgentClient
from gockpt.agent.job import Job
from gockpt.agent.launch import LogTail, log_path
from gockpt.agent.protocol import (
    PROTOCOL,
    Attach,
    Bye,
    Drop,
    Freed,
    Hello,
    Open,
    Pace,
    Ready,
    Refused,
    Update,
)
from gockpt.agent.rendezvous import agent_pid as agent_of_socket
from gockpt.agent.rendezvous import key, meeting_place
from gockpt.agent.rendezvous import sockets as agent_sockets
from gockpt.agent.server import Agent
from gockpt.agent.shared import Shared
from gockpt.agent.work import Work
from gockpt.arena import PAGE, Segment
from gockpt.faults import Fault
from gockpt.storage.lock import Lock, holder

DEADLINE = 200.0


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that another thread or process brings about."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


# -- channels --------------------------------------------------------------------------------------


def sockets() -> tuple[Channel, Channel]:
    one, two = socket.socketpair()
    return SocketChannel(one), SocketChannel(two)


@pytest.fixture(params=[sockets, QueueChannel.pair], ids=["socket", "queue"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    one, two = request.param()
    yield one, two
    one.close()
    two.close()


Ends = tuple[Channel, Channel]


def drop(sequence: int, reason: str = "") -> Drop:
    return Drop(sequence=sequence, reason=reason)


def test_a_receiver_that_has_no_time_left_does_not_wait() -> None:
    """Its time may have run out before it begins to wait: once, a queue then waited for ever."""
    one, two = QueueChannel.pair()
    ended = threading.Event()

    def receive() -> None:
        for number in range(30_000):
            one.send(drop(number))
            assert two.receive(5) is not None
            assert two.receive(1e-6) is None
        ended.set()

    threading.Thread(target=receive, daemon=True).start()
    assert ended.wait(DEADLINE)


def test_messages_arrive_in_order_and_in_both_directions(ends: Ends) -> None:
    one, two = ends
    for sequence in range(50):
        one.send(drop(sequence))
        two.send(Freed(tickets=[sequence]))
    assert [two.receive(5) for _ in range(50)] == [(drop(n), None) for n in range(50)]
    assert [one.receive(5) for _ in range(50)] == [(Freed(tickets=[n]), None) for n in range(50)]


def test_no_message_in_time_is_none(ends: Ends) -> None:
    one, two = ends
    assert one.receive(0) is None
    assert two.receive(0.01) is None
    one.send(Bye())
    assert two.receive(5) == (Bye(), None)
    assert two.receive(0) is None


def test_a_message_is_a_copy(ends: Ends) -> None:
    one, two = ends
    hello = hello_for(Path("nowhere"), faults=[Fault(point="a", action="mark")])
    one.send(hello)
    hello.faults.clear()
    received = two.receive(5)
    assert received is not None
    assert isinstance(received[0], Hello)
    assert [fault.point for fault in received[0].faults] == ["a"]


def test_memory_goes_along_and_is_the_same_memory(ends: Ends) -> None:
    one, two = ends
    segments = [Segment.create(f"test-{number}", (number + 1) * PAGE) for number in range(3)]
    for number, segment in enumerate(segments):
        one.send(Attach(name=str(number), size=segment.size), segment)
        one.send(drop(number))
    for number, segment in enumerate(segments):
        received = two.receive(5)
        assert received is not None
        message, given = received
        assert isinstance(message, Attach)
        assert (message.name, message.size) == (str(number), segment.size)
        assert given is not None
        segment.tensor[7] = 100 + number
        assert (given.size, int(given.tensor[7])) == (segment.size, 100 + number)
        given.tensor[8] = 200 + number
        assert int(segment.tensor[8]) == 200 + number
        assert two.receive(5) == (drop(number), None)
        if given is not segment:
            given.close()
        segment.close()


def test_long_messages_of_several_threads_stay_whole(ends: Ends) -> None:
    one, two = ends
    texts = {sender: chr(97 + sender) * (3 << 20) for sender in range(3)}

    def send(sender: int) -> None:
        for _ in range(3):
            one.send(drop(sender, texts[sender]))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in texts]
    for thread in threads:
        thread.start()
    found = [two.receive(10) for _ in range(9)]
    for thread in threads:
        thread.join(10)
    reasons = sorted(item[0].reason for item in found if item and isinstance(item[0], Drop))
    assert reasons == sorted(text for text in texts.values() for _ in range(3))


def test_what_was_sent_before_the_end_is_still_received(ends: Ends) -> None:
    one, two = ends
    one.send(drop(1))
    one.send(drop(2))
    one.close()
    assert [two.receive(5), two.receive(5)] == [(drop(1), None), (drop(2), None)]
    for _ in range(2):  # and for ever after
        with pytest.raises(ChannelClosed):
            two.receive(5)


def test_a_closed_end_can_be_closed_again_but_not_used(ends: Ends) -> None:
    one, _ = ends
    one.close()
    one.close()
    with pytest.raises(ChannelClosed):
        one.send(drop(1))
    with pytest.raises(ChannelClosed):
        one.receive(0)


def test_sending_to_an_end_that_is_gone_tells_so_at_last(ends: Ends) -> None:
    one, two = ends
    two.close()
    with pytest.raises(ChannelClosed):
        one.receive(5)


def test_a_process_that_ended_is_gone_though_a_fork_holds_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["sleep", "60"]) as peer:
        channel = SocketChannel(ours, peer_pidfd=pidfd(peer.pid))
        assert channel.receive(0) is None
        with theirs.dup() as other:
            SocketChannel(other).send(drop(1))
        peer.kill()
        peer.wait(10)
        assert channel.receive(5) == (drop(1), None)
        with pytest.raises(ChannelClosed, match="process has ended"):
            channel.receive(5)
        channel.close()


# -- the agent, spoken to directly -----------------------------------------------------------------


def hello_for(path: Path, **changes: Any) -> Hello:
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "directory": str(path),
        "rank": 0,
        "world_size": 1,
        "run_id": "0" * 16,
        "launch_id": "0" * 8,
        "threads": 1,
        "keep": 2,
        "pace": Pace(),
        "proof": True,
        "exact": True,
        "require_exact": False,
        "trainer": os.getpid(),
        "started": 0,
        "linger": 0.0,
        "meeting": None,
        "faults": [],
    }
    return Hello(**(values | changes))


@contextlib.contextmanager
def served() -> Iterator[Channel]:
    """An agent on a thread; at the end it must leave by itself."""
    ours, theirs = QueueChannel.pair()
    thread = threading.Thread(target=Agent(theirs).run)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(DEADLINE)
    assert not thread.is_alive()


def answer(channel: Channel) -> Any:
    received = channel.receive(DEADLINE)
    assert received is not None
    return received[0]


def test_an_agent_is_ready_and_leaves_at_a_good_bye(tmp_path: Path) -> None:
    with served() as channel:
        channel.send(hello_for(tmp_path))
        ready = answer(channel)
        assert isinstance(ready, Ready)
        assert (ready.pid, ready.next_sequence) == (os.getpid(), 1)
        channel.send(Bye())
    Lock.acquire(tmp_path, 0, {}).release()


def test_another_protocol_is_refused(tmp_path: Path) -> None:
    with served() as channel:
        channel.send(hello_for(tmp_path, protocol=PROTOCOL + 1))
        refused = answer(channel)
    assert isinstance(refused, Refused)
    assert f"protocol {PROTOCOL + 1}" in refused.reason


def test_a_directory_in_use_is_refused_with_the_holder(tmp_path: Path) -> None:
    lock = Lock.acquire(tmp_path, 0, {"pid": 4242, "host": "elsewhere"})
    with served() as channel:
        channel.send(hello_for(tmp_path))
        refused = answer(channel)
    lock.release()
    assert isinstance(refused, Refused)
    assert refused.kind == "LockedError"
    assert "process 4242 on elsewhere" in refused.reason


def test_silence_and_nonsense_end_it(tmp_path: Path) -> None:
    with served():
        pass
    with served() as channel:
        channel.send(Bye())


def test_what_it_is_told_of_an_unknown_checkpoint_harms_nothing(tmp_path: Path) -> None:
    with served() as channel:
        channel.send(hello_for(tmp_path))
        assert isinstance(answer(channel), Ready)
        channel.send(drop(77))
        assert answer(channel).sequence == 77


# -- training with an agent ------------------------------------------------------------------------


def agent_pid(path: Path) -> int:
    pid = holder(path / ".gockpt" / "rank-00000.lock")["pid"]
    assert isinstance(pid, int)
    return pid


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_agent(ckpt: gockpt.Checkpointer, path: Path, *, wait: bool = True) -> int:
    """SIGKILL it; return when its death was noticed, or when a new one serves."""
    client = client_of(ckpt)
    pid, generation = agent_pid(path), client.generation
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    if wait:
        until(lambda: client.ready and client.generation > generation, "a new agent")
    else:
        until(lambda: not client.ready or client.generation > generation, "its death to be seen")
    return pid


def client_of(ckpt: gockpt.Checkpointer) -> AgentClient:
    assert ckpt.client is not None
    return ckpt.client


def committed(path: Path) -> set[int]:
    return {gockpt.open(one).step for one in path.glob("step-*")}


def test_the_socket_of_an_agent_that_died_is_cleared_away(tmp_path: Path) -> None:
    training = Bag()
    prefix = key(tmp_path, 0)
    with checkpointer(training, tmp_path, every=2, windows=2, agent="process") as ckpt:
        kill_agent(ckpt, tmp_path)
        found = [agent_of_socket(path) for path in agent_sockets(meeting_place(), prefix)]
        assert found == [agent_pid(tmp_path)]
    assert agent_sockets(meeting_place(), prefix) == []


def test_a_close_while_a_new_agent_starts_waits_for_it_and_lets_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not have been told, been killed after half a minute, and left its socket."""
    begun: list[Any] = []
    replaced = threading.Event()

    def start(mode: Any, log: Path) -> Any:
        running = launch.start(mode, log)
        os.kill(running.pid, signal.SIGSTOP)  # until the trainer is closing
        begun.append(running)
        replaced.set()
        return running

    ckpt = checkpointer(Bag(), tmp_path, agent="process")
    monkeypatch.setattr("gockpt.agent.client.start", start)
    os.kill(agent_pid(tmp_path), signal.SIGKILL)
    assert replaced.wait(DEADLINE)
    closing = threading.Thread(target=ckpt.close)
    closing.start()
    until(lambda: client_of(ckpt)._closing, "the end to begin")
    os.kill(begun[0].pid, signal.SIGCONT)
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert begun[0]._process.returncode == 0
    assert agent_sockets(meeting_place(), key(tmp_path, 0)) == []


def test_what_an_agent_that_died_had_begun_to_write_is_taken_away(tmp_path: Path) -> None:
    """A checkpoint that was lost with its agent is taken by nobody again, under this name."""
    with checkpointer(Bag(), tmp_path, agent="process") as ckpt:
        launch_id = client_of(ckpt)._hello.launch_id
        begun = storage.create_checkpoint(tmp_path, step=8, sequence=2, launch=launch_id)
        (begun / storage.file_name(0)).write_bytes(b"half of it")
        kill_agent(ckpt, tmp_path)
        assert not begun.exists()


def test_an_agent_that_is_killed_at_the_end_leaves_no_socket(tmp_path: Path) -> None:
    ckpt = checkpointer(Bag(), tmp_path, agent="process")
    client = client_of(ckpt)
    client._closing = True  # nobody comes after it
    os.kill(agent_pid(tmp_path), signal.SIGKILL)
    until(lambda: client._running.join(0), "its end")
    client._closing = False
    ckpt.close()
    assert agent_sockets(meeting_place(), key(tmp_path, 0)) == []


def test_only_the_last_words_of_the_agent_that_died_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_path(str(tmp_path), 0)
    log.parent.mkdir()
    log.write_text("words of an earlier one\n")
    with checkpointer(Bag(), tmp_path, agent="process") as ckpt:
        kill_agent(ckpt, tmp_path)
    assert "the agent was lost (nothing in its log)" in caplog.text
    own = LogTail.begin(log)
    with log.open("a") as file:
        file.write("first\nlast\n" + "x" * 10_000 + "\nend\n")
    assert str(own).endswith("x | end")
    assert str(LogTail.begin(log)) == "nothing in its log"
    assert str(LogTail.begin(log.with_name("none"))) == "it has no log"


CLOSED = """
import os, sys, torch, gockpt
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
with gockpt.Checkpointer(model, optimizer, sys.argv[1], every=2, windows=2) as ckpt:
    for _ in range(4):
        os.write(1, b"noise")  # as a library does, whatever these are by now
        os.write(2, b"noise")
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ckpt.step()
        ckpt.wait(60)
"""


def test_a_trainer_without_stdin_stdout_and_stderr(tmp_path: Path) -> None:
    """What is opened next must not be taken for these, and be written into."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run([*command, str(tmp_path)], check=False, timeout=200).returncode == 0
    assert committed(tmp_path) == {2, 4}
    assert [gockpt.open(tmp_path, step).verify() for step in (2, 4)] == [[], []]
    assert holder(tmp_path / ".gockpt" / "rank-00000.lock")["launch"]
    assert "noise" not in "".join(str(one.read_bytes()) for one in tmp_path.glob(".gockpt/*"))


def test_a_process_of_its_own_that_leaves_when_closed(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=2, agent="process") as ckpt:
        pid = agent_pid(tmp_path)
        assert pid in {child.pid for child in psutil.Process().children()}
        assert os.getsid(pid) == pid  # a signal to the trainer's terminal is not for it
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            ckpt.step()
    assert gone(pid)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [t for t in threading.enumerate() if t.name.startswith("gockpt-agent")]
    assert committed(tmp_path) == {2, 4}


def test_closing_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def once(path: Path) -> None:
        run(Bag(), path, steps=4, every=2, windows=2, device="cpu")

    once(tmp_path / "first")
    gc.collect()
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    for number in range(3):
        once(tmp_path / str(number))
    until(lambda: set(threading.enumerate()) <= threads, "the end of all threads")
    gc.collect()  # a mapping holds a descriptor until its last view has gone
    assert psutil.Process().num_fds() <= descriptors


def killed_run(path: Path, kills: set[int], *, steps: int, **arguments: Any) -> Ran:
    """A run with windows after steps 3, 4, 5 and 8, 9, 10 …, whose agent is killed after some."""

    def after(ckpt: gockpt.Checkpointer, training: Training, step: int) -> None:
        if step % 5 == 4 or step + 1 in kills:
            ckpt.wait(DEADLINE)  # what is proved is never lost; how far it was must not be chance
        if step in kills:
            pids.append(kill_agent(ckpt, path, **arguments))

    pids: list[int] = []
    ran = run(Bag(), path, steps=steps, every=5, windows=3, after=after, agent="process")
    assert len(set(pids)) == len(kills)
    assert all(map(gone, [*pids, agent_pid(path)]))
    return ran


def test_killed_while_idle_and_while_windows_are_open(tmp_path: Path) -> None:
    ran = killed_run(tmp_path, {1, 8}, steps=10)
    check(ran, [5, 10], lambda: Bag(3))
    # Its memory was torn: the same step is taken by one copy, and says why.
    assert [ran.infos[step].windows for step in (5, 10)] == [3, 1]
    assert "agent" in ran.infos[10].fallback


def test_killed_inside_windows_while_training_goes_on(tmp_path: Path) -> None:
    """Its slot is not lost, though nobody is there who could say that it is free."""
    ran = killed_run(tmp_path, {3}, steps=10, wait=False)
    check(ran, [5, 10], None)
    assert [ran.infos[step].windows for step in (5, 10)] == [1, 1]


def test_killed_in_the_last_window(tmp_path: Path) -> None:
    """Its update has not come yet: the target is past, but the state still stands."""
    ran = killed_run(tmp_path, {5}, steps=10)
    check(ran, [5, 10], None)


def lost_unproved(path: Path, windows: int) -> tuple[gockpt.Checkpointer, Any]:
    """A run whose agent is killed when it has all of step 8 but has proved nothing of it."""
    training = Bag()
    ckpt = checkpointer(training, path, every=4, windows=windows, agent="process")
    for step in range(1, 8):
        one_pass(ckpt, training, step)
        ckpt.step()
        if step == 6:
            ckpt.wait(DEADLINE)  # for step 4: it is not what is lost
    os.kill(agent_pid(path), signal.SIGSTOP)  # it proves nothing from here on
    one_pass(ckpt, training, 8)
    ckpt.step()
    handle = ckpt.save()
    assert handle.step == 8
    one_pass(ckpt, training, 9)
    ckpt.step()
    kill_agent(ckpt, path)
    return ckpt, handle


def test_a_last_checkpoint_that_was_lost_with_the_agent_is_raised_at_the_end(
    tmp_path: Path,
) -> None:
    ckpt, handle = lost_unproved(tmp_path, windows=2)
    with pytest.raises(gockpt.AgentError, match="before step 8 was complete: some of its parts"):
        handle.wait(DEADLINE)
    with pytest.raises(gockpt.AgentError, match="before step 8 was complete"):
        ckpt.close()
    assert committed(tmp_path) == {4}


def test_what_needs_no_replay_is_proved_by_the_next_agent(tmp_path: Path) -> None:
    ckpt, handle = lost_unproved(tmp_path, windows=1)
    ckpt.close()
    assert handle.done()
    assert committed(tmp_path) == {4, 8}
    assert gockpt.open(tmp_path, 8).info.proof["outcome"] == "exact"
    twin = Bag()
    for step in range(1, 9):
        twin.compute(step)
        twin.update(step)
    assert_same(gockpt.open(tmp_path, 8).load(), truth(twin), "step 8")


@pytest.mark.parametrize("point", ["output.written", "output.committed"])
def test_killed_while_it_writes_a_proved_checkpoint(point: str, tmp_path: Path) -> None:
    """Its memory is passed on: nothing is lost, and nothing is there twice."""

    def after(ckpt: gockpt.Checkpointer, training: Training, step: int) -> None:
        if step % 4 == 0:
            ckpt.wait(DEADLINE)

    kill = Fault(point=point, action="kill", after=1)  # all are passed once for each checkpoint
    ran = run(
        Bag(), tmp_path, steps=8, every=4, windows=3, after=after, agent="process", faults=[kill]
    )
    check(ran, [4, 8], None)
    assert [ran.infos[step].windows for step in (4, 8)] == [3, 3]
    assert sorted(int(one.name[5:14]) for one in tmp_path.glob("step-*")) == [4, 8]
    assert not list(tmp_path.glob(".trash-*"))
    assert not ran.events


def test_killed_at_the_very_end(tmp_path: Path) -> None:
    """Between the last checkpoint and ``close``: nothing is missing, so nothing is raised."""
    training = Bag()
    with checkpointer(training, tmp_path, every=2, windows=2, agent="process") as ckpt:
        for step in range(1, 5):
            one_pass(ckpt, training, step)
            ckpt.step()
        ckpt.wait(DEADLINE)
        os.kill(agent_pid(tmp_path), signal.SIGKILL)
    assert committed(tmp_path) == {2, 4}
    names = {"gockpt-agent", "gockpt-inbox", "gockpt-outbox"}
    assert not [thread for thread in threading.enumerate() if thread.name in names]
    until(lambda: all(gone(child.pid) for child in psutil.Process().children()), "its end")


# -- an agent that fails by itself -----------------------------------------------------------------

BROKEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@BROKEN
def test_a_thread_that_fails_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Agent._handle, []

    def handle(self: Agent, message: Any, segment: Any) -> None:
        if isinstance(message, Update):
            calls.append(message)
            if len(calls) == 3:  # that of pass 7, so that the target is still ahead
                raise RuntimeError("a defect of the agent")
        real(self, message, segment)

    monkeypatch.setattr(Agent, "_handle", handle)

    def settled(ckpt: Any, training: Any, step: int) -> None:
        ckpt.wait(DEADLINE)
        if step == 7:
            ckpt.client.wait_for(lambda: ckpt.client.generation == 2, DEADLINE, "another agent")

    ran = run(Bag(), tmp_path, steps=12, every=4, windows=3, after=settled)
    check(ran, [4, 8, 12], lambda: Bag(5))
    assert ran.infos[8].windows == 1
    assert "agent" in ran.infos[8].fallback


def test_a_defect_in_one_checkpoint_costs_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect of the replay")

    monkeypatch.setattr(Job, "update", broken)

    def heard(ckpt: Any, training: Any, step: int) -> None:
        if step == 3:  # the first update inside windows; the trainer must know before the target
            ckpt.client.wait_for(lambda: ckpt.client.problems, DEADLINE, "the failure")

    ran = run(Bag(), tmp_path, steps=8, every=4, windows=3, after=heard)
    check(ran, [4, 8], None)
    assert "a defect of the replay" in ran.infos[4].fallback
    assert "a defect of the replay" in ran.infos[8].fallback


def test_new_memory_waits_for_what_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that lags must not begin the dropped checkpoint in the memory of the next one."""

    class Thawed(Bag):
        """Its layout grows while the first windows are open."""

        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.bag.list[0].requires_grad_(False)

        def between(self, step: int) -> None:
            if step == 2:
                self.bag.list[0].requires_grad_(True)

    begin, wait_for, make = Work.begin, AgentClient.wait_for, Shared.allocate
    again = threading.Event()
    dropped: list[bool] = []

    def late(work: Work, message: Open) -> None:
        assert again.wait(DEADLINE)
        begin(work, message)

    def waiting(client: AgentClient, condition: Any, timeout: float, what: str) -> None:
        if client.slot_bytes and what.startswith("earlier checkpoints"):
            again.set()
        wait_for(client, condition, timeout, what)

    def made(shared: Shared, **sizes: int) -> None:
        dropped.append(shared.dropped)
        make(shared, **sizes)

    monkeypatch.setattr(Work, "begin", late)
    monkeypatch.setattr(AgentClient, "wait_for", waiting)
    monkeypatch.setattr(Shared, "allocate", made)
    ran = run(Thawed(), tmp_path, steps=10, every=5, windows=4)
    check(ran, [5, 10], lambda: Thawed(seed=9))
    assert len(dropped) > 1  # at the start, and when the layout had grown
    assert not any(dropped)


@BROKEN
def test_agents_that_fail_one_after_the_other_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect of the agent")

    monkeypatch.setattr(Work, "begin", broken)
    monkeypatch.setattr(Work, "adopt", broken)  # else each one might finish what is left to it
    training = Bag()
    ckpt = checkpointer(training, tmp_path, every=1, windows=1)

    def train() -> None:
        limit = time.monotonic() + DEADLINE
        for step in itertools.count(1):
            if time.monotonic() > limit:
                return
            one_pass(ckpt, training, step)
            ckpt.step()
            client_of(ckpt).wait_a_moment()

    with pytest.raises(gockpt.AgentError, match=f"{MAX_RESTARTS + 1} agents were lost in a row"):
        train()
    state = truth(training)
    one_pass(ckpt, training, 0)  # training itself goes on
    assert any(not torch.equal(value, state[name]) for name, value in truth(training).items())
    with pytest.raises(gockpt.AgentError):
        ckpt.close()
    ckpt.close()


def test_an_agent_that_cannot_start_is_a_plain_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(gockpt.AgentError, match="did not start"):
        checkpointer(Bag(), tmp_path, agent="process")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(gockpt.AgentError, match="cannot be started"):
        checkpointer(Bag(), tmp_path, agent="process")
