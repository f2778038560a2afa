"""A sender that is stopped in the middle of a write, over real NIXL: nobody else may have its pages before it goes on.

Its control connection goes through a relay that ends it, as a sidecar, a load balancer or a partition of the control
network would; the bytes go their own way. The *heir* wants every page of the buffer meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.helpers.on_device import IS_GPU, ucx_tls
from tests.helpers.tcp_relay import TcpRelay
from tests.helpers.zygote import LIMIT_S, START_LIMIT_S, Child, CommandFailed, Zygote
from transfer.agents.nixl import EXIT_OVERSLEPT

pytest.importorskip("nixl", reason="the KV transfer needs NIXL (extra: engine)")

pytestmark = pytest.mark.engine

NUM_PAGES = 32
PAGE_BYTES = 1 << 20
HEARTBEAT_S = 0.2
WRITER_TIMEOUT_S = 20.0
"""Nobody is taken to be silent because the machine is busy. Who shall be is said to have been, by `was_silent`."""
FENCE_S = 2.5
"""The victim's write may land until then, and a victim that wakes later ends itself. It is longer than
`transfer.agents.nixl.NAP_S`."""
HEARTBEATS_S = 3 * HEARTBEAT_S
"""A silent sender is reminded with every one of them."""
ALL = list(range(NUM_PAGES))
LANES = {
    "tcp": {"UCX_TLS": ucx_tls("tcp,self"), "UCX_TCP_SNDBUF": "256k", "UCX_TCP_RCVBUF": "256k"},
    "cma": {"UCX_TLS": ucx_tls("tcp,sm,self")},
}


class Scene:
    """A receiver, a victim that reaches it through the relay, and an heir that reaches it without."""

    def __init__(self, zygote: Zygote, lane: str) -> None:
        self.zygote, self.lane, self.attempt = zygote, lane, ""
        environment = LANES[lane]
        self.receiver = self.new_receiver(0)
        self.victim, self.heir = (zygote.fork("sender", salt, **environment) for salt in (1, 2))
        started = [(child, child.say("start")) for child in (self.receiver, self.victim, self.heir)]
        self.endpoint, *_ = [child.answer(number, START_LIMIT_S) for child, number in started]
        self.relay = TcpRelay((self.endpoint[0], self.endpoint[1]))

    def new_receiver(self, port: int) -> Child:
        return self.zygote.fork("receiver", port, WRITER_TIMEOUT_S, **LANES[self.lane])

    def open(self, sender: Child, attempt: str, pages: int = NUM_PAGES) -> int:
        """Returns the question; its answer is the grant."""
        port = self.relay.port if sender is self.victim else self.endpoint[1]
        return sender.say("open", "127.0.0.1", port, attempt, pages, 60.0)

    def warm_up(self) -> None:
        """So that both have a connection for their bytes."""
        for sender in (self.victim, self.heir):
            sender.answer(self.open(sender, "first"))
            self.write(sender, "first")
            self.receiver.ask("read", "first")

    def write(self, sender: Child, attempt: str) -> None:
        sender.ask("fill", attempt, ALL)
        assert sender.ask("finish", attempt)[0] == NUM_PAGES * PAGE_BYTES

    def stop_in_mid_write(self) -> None:
        """The victim has `attempt`, and part of it has not been written."""
        for self.attempt in ("a", "b", "c", "d", "e", "f", "g", "h"):
            self.victim.answer(self.open(self.victim, self.attempt))
            filled = self.victim.say("fill_and_stop", self.attempt, ALL, FENCE_S)
            if self.victim.stops(filled):
                if self.receiver.ask("num_changed", self.attempt) < NUM_PAGES * PAGE_BYTES:
                    return
                self.victim.thaw()
            # Somebody else had the processor until the write was over.
            self.victim.ask("finish", self.attempt)
            self.receiver.ask("read", self.attempt)
        raise AssertionError("every write was over before its process could be stopped")

    def end_well(self, *senders: Child) -> None:
        self.write(self.heir, "heir")
        assert self.receiver.ask("read", "heir") == self.heir.ask("checksum", ALL)
        assert self.receiver.ask("num_wrong_tags") == 0, "it is not the tags that have saved it"
        assert self.receiver.ask("free_pages", NUM_PAGES) < LIMIT_S
        for child in (*senders, self.receiver):
            child.close()


@pytest.fixture(params=LANES)
def scene(zygote: Zygote, request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = Scene(zygote, request.param)
    with scene.relay:
        scene.warm_up()
        yield scene
    zygote.reap_all()


def test_a_sender_is_stopped_in_mid_write_and_its_control_connection_is_cut(scene: Scene) -> None:
    """When it goes on it ends itself: not one of its bytes lands in pages of the heir, who gets them then."""
    scene.stop_in_mid_write()
    (victim,) = scene.receiver.ask("writers")
    lost = scene.receiver.say("lost", scene.attempt)
    waiting = scene.open(scene.heir, "heir")
    scene.relay.cut()
    scene.receiver.ask("was_silent", victim)
    reason, _ = scene.receiver.answer(lost)  # the attempt itself does not wait
    assert "vanished" in reason
    time.sleep(FENCE_S)  # what is tested is that nothing happens meanwhile
    assert (scene.receiver.ask("num_free"), scene.receiver.ask("num_quarantined")) == (0, NUM_PAGES)
    scene.victim.thaw()
    assert scene.victim.exit_status() == EXIT_OVERSLEPT
    scene.heir.answer(waiting)
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.heir)


def test_a_sender_goes_on_whatever_and_says_so_over_a_new_connection(scene: Scene) -> None:
    """The heir gets the pages when the sender has said that it has ended, and not before."""
    scene.victim.ask("go_on_whatever")
    scene.stop_in_mid_write()
    (victim,) = scene.receiver.ask("writers")
    lost = scene.receiver.say("lost", scene.attempt)
    waiting = scene.open(scene.heir, "heir")
    scene.relay.cut()
    scene.receiver.ask("queued", 1)
    scene.receiver.ask("was_silent", victim)
    scene.receiver.answer(lost)
    time.sleep(HEARTBEATS_S)  # what is tested is that nothing happens meanwhile
    assert (scene.receiver.ask("num_free"), scene.receiver.ask("num_quarantined")) == (0, NUM_PAGES)
    ended = scene.victim.say("ended", scene.attempt)
    scene.victim.thaw()
    scene.victim.answer(ended)
    assert scene.receiver.ask("num_free") == 0, "it could not say so yet"
    scene.relay.mend()
    scene.heir.answer(waiting)
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.victim, scene.heir)


def test_a_sender_is_killed_in_mid_write_and_its_control_connection_was_cut(scene: Scene) -> None:
    """On one machine its pages come back promptly, stopped though it was."""
    scene.stop_in_mid_write()
    waiting = scene.open(scene.heir, "heir")
    scene.relay.cut()
    scene.receiver.ask("queued", 1)
    scene.victim.kill()
    killed_at = time.monotonic()
    scene.heir.answer(waiting)
    assert time.monotonic() - killed_at < WRITER_TIMEOUT_S / 2, "nobody had to be silent for long"
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.heir)


def test_a_sender_elsewhere_is_killed_and_somebody_says_so(scene: Scene) -> None:
    """Nobody here can see its process: its pages wait for the word, however long."""
    scene.receiver.ask("be_elsewhere")
    scene.stop_in_mid_write()
    (victim,) = scene.receiver.ask("writers")
    waiting = scene.open(scene.heir, "heir")
    scene.receiver.ask("queued", 1)
    lost = scene.receiver.say("lost", scene.attempt)
    scene.victim.kill()
    scene.receiver.ask("was_silent", victim)
    scene.receiver.answer(lost)
    time.sleep(HEARTBEATS_S)  # what is tested is that nothing happens meanwhile
    assert scene.receiver.ask("num_quarantined") == NUM_PAGES
    scene.receiver.ask("sender_ended", victim)
    scene.heir.answer(waiting)
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.heir)


def test_with_the_quarantine_switched_off_the_tags_tell(scene: Scene) -> None:
    """The heir is complete and right, and then the victim goes on: what is read then is not the heir's KV."""
    scene.victim.ask("go_on_whatever")
    scene.stop_in_mid_write()
    waiting = scene.open(scene.heir, "heir")
    scene.receiver.ask("queued", 1)
    scene.receiver.ask("forget_writers", scene.attempt)
    scene.heir.answer(waiting)
    scene.write(scene.heir, "heir")
    scene.receiver.ask("ready", "heir")
    assert scene.receiver.ask("num_wrong_tags") == 0
    landed = scene.victim.say("written", scene.attempt)
    scene.victim.thaw()
    scene.victim.answer(landed)
    with pytest.raises(
        CommandFailed, match=r"AttemptLost: .* of the 32 pages of attempt heir were not written by it last"
    ):
        scene.receiver.ask("read", "heir")
    assert scene.receiver.ask("num_wrong_tags") == 1
    assert scene.receiver.ask("free_pages", NUM_PAGES) < LIMIT_S


def test_a_late_write_while_the_engine_copies_is_seen_behind_the_copy(scene: Scene) -> None:
    scene.victim.ask("go_on_whatever")
    scene.stop_in_mid_write()
    waiting = scene.open(scene.heir, "heir")
    scene.receiver.ask("queued", 1)
    scene.receiver.ask("forget_writers", scene.attempt)
    scene.heir.answer(waiting)
    scene.write(scene.heir, "heir")
    copied = scene.receiver.say("copy_slowly", "heir")
    scene.receiver.ask("taken", "heir")
    landed = scene.victim.say("written", scene.attempt)
    scene.victim.thaw()
    scene.victim.answer(landed)
    scene.receiver.ask("go_on")
    with pytest.raises(CommandFailed, match="AttemptLost"):
        scene.receiver.answer(copied)
    assert scene.receiver.ask("free_pages", NUM_PAGES) < LIMIT_S


def test_the_receiver_is_restarted_while_a_sender_is_stopped_in_mid_write(scene: Scene) -> None:
    """Its successor has another slab, which the late write does not reach."""
    scene.victim.ask("go_on_whatever")
    scene.stop_in_mid_write()
    scene.receiver.kill()
    scene.receiver = scene.new_receiver(scene.endpoint[1])
    scene.receiver.ask("start", limit_s=START_LIMIT_S)
    scene.heir.answer(scene.open(scene.heir, "heir"))
    ended = scene.victim.say("ended", scene.attempt)
    scene.victim.thaw()
    scene.victim.answer(ended)
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.victim, scene.heir)


def test_an_agent_gives_up_in_mid_write(scene: Scene) -> None:
    """NIXL reports an error, and a part of the write may be in the kernel still."""
    if IS_GPU and scene.lane == "tcp":
        pytest.skip("UCX 1.23 may copy it in software when the sender has given it up: GPU memory over TCP is no lane")
    scene.victim.answer(scene.open(scene.victim, "a"))
    waiting = scene.open(scene.heir, "heir")
    scene.receiver.ask("queued", 1)
    scene.victim.ask("fill_and_break", "a", ALL)
    scene.heir.answer(waiting)
    time.sleep(0.2)  # for what would come late
    assert scene.receiver.ask("num_changed", "heir") == 0
    scene.end_well(scene.heir)
