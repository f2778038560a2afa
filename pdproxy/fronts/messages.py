"""The messages between a front and the leader.

An attempt is known by its id, which nobody else has. An instance is known by a number, its *place*, which the leader
gives out and never gives out again. Times are in seconds from now, because clocks differ. Each direction is in order:
what a grant relies on was told before it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdproxy.engines.info import EngineInfo
from pdproxy.telemetry.figures import Figures

PROTOCOL = 4
"""The number of this set of messages. Both ends must have the same."""
LAST = 1 << 62
"""The number of a front's last report, which nobody has asked for: all that it did is over."""


RoomFields = tuple[int, int, int | None, int]
"""The fields of `admission.room.Room`; None stands for an answer of any length."""


class _Message(msgspec.Struct, array_like=True):
    """A message is an array whose first element tells its class."""


# ── from a front ────────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(_Message, tag=0):
    """The first message of a front: who it is."""

    protocol: int
    pid: int


class Ask(_Message, tag=1):
    """An attempt asks for its turn."""

    attempt: str
    model: str | None
    sizes: dict[int, int | None]
    """The pages that it takes, by the number of an owner's shape; None where such an owner cannot serve it."""
    waited_s: float
    """The seconds since its request came."""
    left_s: float | None
    """The seconds until it gives up; None where it never does."""
    priority: int
    avoid: tuple[str, ...]
    tied_s: float | None
    """The seconds for which it takes only the instance that it is tied to; None where it is not tied."""
    is_again: bool
    session: str | None
    key: bytes | None
    """The beginning of its prompt, in the form that routing goes by; None where routing does not."""
    num_tokens: int = 0
    """The tokens of its prompt, which the leader counts as queued at the prefiller when it grants."""
    room: RoomFields = (0, 0, None, 1)
    text_terms: tuple[tuple[str, str], ...] | None = None
    """The terms of the revision that has begun its answer; None where there is none yet."""


class Cancel(_Message, tag=2):
    """An attempt that has asked is over, so that nobody waits for its turn. A grant on its way comes back unused."""

    attempt: str


class Resize(_Message, tag=3):
    """An attempt that has asked tells its pages at shapes that it has heard of since."""

    attempt: str
    sizes: dict[int, int | None]


class Errand(_Message, tag=4):
    """A call that makes an attempt's pages free, to one of its two instances. See `engines.adapter.ReleaseCall`."""

    role: str
    path: str
    body: bytes
    headers: dict[str, str]
    timeout_s: float | None


class Sent(_Message, tag=5):
    """The attempt's prefill leg is about to be sent. `guard` frees its pages should the front end before it does. Where
    the engines have no such call, this message is left out."""

    attempt: str
    guard: Errand


class Shrink(_Message, tag=6):
    attempt: str
    pages: int


class Unbound(_Message, tag=10):
    """The attempt has no use any more for the owner of its pages, for its peer, or for both."""

    attempt: str
    owner: bool
    peer: bool


class Free(_Message, tag=7):
    """The attempt's pages are free. They were in the state `custody`, and `evidence` proves it. The rest is as in
    `Unbound`: most attempts end all at once."""

    attempt: str
    custody: str
    evidence: str
    owner: bool = False
    peer: bool = False


class Abandon(_Message, tag=8):
    """The request is over, and its pages are not known to be free. See `admission.custody.Way`."""

    attempt: str
    custody: str
    errand: Errand | None
    not_before_s: float
    over_after_s: float
    settles_after_s: float
    is_closing: bool


class Hurry(_Message, tag=9):
    """The errand of an abandoned attempt may begin: the event that it waited for has come."""

    attempt: str


class Load(_Message, tag=13):
    """Sums up what has changed at a place: legs that were sent, and those of them or of earlier ones that ended well;
    prompt tokens that wait for their prefill, fewer where the number is negative, and those that were read; handoffs to
    a decoder, and their seconds together. All legs were sent in the breaker's era `era`, while it was closed."""

    place: int
    era: int
    num_sent: int
    num_ok: int
    num_tokens: int
    num_read: int = 0
    num_handed: int = 0
    handed_s: float = 0.0


class Trial(_Message, tag=11):
    """A leg of the attempt is sent while the breaker is not closed, so that it is a probe. `leg` is its number, which
    is above 0."""

    place: int
    leg: int
    attempt: str


class LegFinished(_Message, tag=12):
    """A trial has ended; or a leg that `Load` told of, and was sent in the era `era`, has not ended well. Then `leg` is
    0. `outcome` is as in `telemetry.observer.LegObserver.leg_finished`."""

    place: int
    leg: int
    era: int
    outcome: str


class Suspect(_Message, tag=14):
    """A leg met a fault at the process `epoch`, or a look is wanted (`why` None)."""

    place: int
    epoch: str | None
    why: str | None
    is_lost: bool


class Blame(_Message, tag=15):
    place: int
    epoch: str | None
    era: int
    attempt: str
    why: str


class Wanted(_Message, tag=16):
    """A request for this model found too few instances."""

    model: str | None


class Report(_Message, tag=17):
    """The answer to `ReportNow`, and a sign of life."""

    number: int
    figures: Figures


class Claim(_Message, tag=18):
    """An attempt goes on that another leader bound to these two places. It has a use for the owner, its peer or both,
    and holds `pages` of the owner's process `epoch`, or none. `guard` is as in `Sent`."""

    attempt: str
    model: str | None
    owner: int
    peer: int
    uses_owner: bool
    uses_peer: bool
    epoch: str | None
    pages: int
    custody: str
    guard: Errand | None
    room: RoomFields = (0, 0, None, 1)


class Written(_Message, tag=22):
    """The tokens that were seen so far of answers which are written at a place, by attempt."""

    place: int
    num_tokens: dict[str, int]


class Heard(_Message, tag=20):
    """A KV signal that came to the address of this front's replica, and is for a front of another one."""

    frame: bytes


class Proven(_Message, tag=21):
    """A leader before this one has seen a request go through the process `epoch` at a place; where `is_alone`, only
    such that it answered without a counterpart."""

    place: int
    epoch: str
    is_alone: bool = False


class Serving(_Message, tag=19):
    """The front takes clients from now on."""


# ── from the leader ─────────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(_Message, tag=32):
    """The first message of the leader. `settings` are those of the command line, the environment and the file."""

    protocol: int
    settings: dict[str, Any]
    num_fronts: int
    operators: str
    """The path of the Unix socket at which the leader answers what fronts do not."""
    replica: str | None = None
    """The name of the replica that the front belongs to, whose leader is told by `Lead`; None where the process that
    says this is the leader itself."""


class Lead(_Message, tag=46):
    """Another leads from now on, in the term `term`, and takes fronts at `address`. Those who know the `secret` belong
    to the fleet. A front that it does not hear of for `ttl_s` seconds has gone."""

    term: int
    address: str
    secret: str
    ttl_s: float


class Listed(_Message, tag=47):
    """All instances of the fleet have been told."""


class Joined(_Message, tag=33):
    """An instance has joined the fleet."""

    place: int
    settings: str
    """The instance's settings in JSON, as `config.instances.InstanceSettings` writes them."""


class Facts(_Message, tag=34):
    """The facts that the process at a place has told of itself. Owners whose `shape` is equal take equal pages."""

    place: int
    facts: EngineInfo
    shape: int


class State(_Message, tag=35):
    """The leader's judgement of a place."""

    place: int
    health: str
    why: str
    is_up: bool
    is_draining: bool
    is_doubted: bool
    is_suspected: bool
    era: int
    breaker: str
    opened_s: float
    """The seconds since the breaker opened."""
    num_probes: int
    probes_s: float
    is_expected: bool = False
    """True where it is not known yet whether it becomes ready in a moment."""
    is_proven_alone: bool = False
    """True where no request has shown yet that its KV arrives elsewhere."""


class Left(_Message, tag=36):
    """An instance has left the fleet. What is under way there goes on."""

    place: int


class Granted(_Message, tag=37):
    """The attempt goes to these two places, and holds so many of the owner's pages."""

    attempt: str
    owner: int
    peer: int
    pages: int
    is_scarce: bool
    """Says that others wait, so that pages should come back at once."""
    num_tokens: int = 0
    """The prompt tokens that the leader has counted for it. From here on the front tells what becomes of them."""
    lacked: str = ""
    """The thing that it waited for, as `Demand.lacks` has it; empty where it did not wait."""
    forecast: tuple[float, bool] | None = None
    """The fields of an `admission.grant.Forecast`; None where there is none."""


class Scarce(_Message, tag=48):
    """Tells that somebody waits from now on, so that whoever has free pages should say so at once."""


class Refused(_Message, tag=38):
    """The attempt gets no turn. `kind` is the error's class."""

    attempt: str
    kind: str
    message: str
    retry_after_s: float | None
    pages: int = 0
    capacity: int = 0


class Settled(_Message, tag=39):
    """The pages of an abandoned attempt have come back, by this evidence."""

    attempt: str
    evidence: str


class Signal(_Message, tag=40):
    """A KV signal that came to an address which fronts share, and is for some front. Where `is_to_be_told`, a front
    that does not know it tells the leader of it."""

    frame: bytes
    is_to_be_told: bool = False


class ReportNow(_Message, tag=42):
    """Asks a front for its figures. Numbers grow."""

    number: int


class Leave(_Message, tag=43):
    """Clients are to go elsewhere: new requests are still served."""


class Retire(_Message, tag=45):
    """Another front has taken this one's place: it takes no more clients, and ends when those it has have gone."""


class Tokenizer(_Message, tag=44):
    """The report on the tokenizer of the process at a place."""

    place: int
    epoch: str | None
    agrees: bool | None
    why: str
    frame: tuple[int, int] | None
    """The two numbers of a `tokens.bounds.ChatFrame`."""


FromFront = (
    Hello
    | Ask
    | Cancel
    | Resize
    | Sent
    | Shrink
    | Free
    | Abandon
    | Hurry
    | Unbound
    | Load
    | Trial
    | LegFinished
    | Suspect
    | Blame
    | Wanted
    | Claim
    | Written
    | Heard
    | Proven
    | Report
    | Serving
)
FromLeader = (
    Welcome
    | Lead
    | Joined
    | Listed
    | Facts
    | State
    | Left
    | Granted
    | Scarce
    | Refused
    | Settled
    | Signal
    | ReportNow
    | Leave
    | Retire
    | Tokenizer
)
