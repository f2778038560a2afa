"""The module writes what a workload asks in the form that a target wants."""

from __future__ import annotations

from pdproxy.engines.http.base import EngineClient
from pdproxy.loadtest.calibration import calibrate
from pdproxy.loadtest.corpus import Corpus, Scale
from pdproxy.loadtest.errors import TargetError
from pdproxy.loadtest.record import Setting
from pdproxy.loadtest.request_runner import Call
from pdproxy.loadtest.target import Target
from pdproxy.loadtest.workload import Session, Workload

UNMEASURED = Scale(tokens_per_word=1.3)
"""The scale for a target that does not say how long prompts were: it is usual for English."""


class Writer:
    """Writer makes the bodies of requests. It is immutable."""

    def __init__(self, target: Target, corpus: Corpus, scale: Scale, *, is_measured: bool) -> None:
        self._target = target
        self._corpus = corpus
        self._scale = scale
        self._is_measured = is_measured

    def first(self, session: Session) -> Call:
        return self._call(session, 0, [self._corpus.render(session.asks[0].pieces, self._scale)])

    def following(self, call: Call, said: list[str], answer: str) -> Call:
        """Returns the next turn's request; `said` grows with what was said since."""
        session, turn = call.session, call.turn
        space = "" if self._target.endpoint == "chat" else " "
        if not said:
            said.append(self._corpus.render(session.asks[0].pieces, self._scale))
        said += [answer, space + self._corpus.render(session.asks[turn + 1].pieces, self._scale)]
        return self._call(session, turn + 1, said)

    def settings(self) -> dict[str, Setting]:
        if self._target.token_ids is not None:
            return {"prompts": "token ids"}
        return {
            "prompts": "words",
            "tokens_per_word": round(self._scale.tokens_per_word, 3),
            "prompt_overhead": round(self._scale.overhead, 1),
            "is_scale_measured": self._is_measured,
        }

    def _call(self, session: Session, turn: int, said: list[str]) -> Call:
        ask = session.asks[turn]
        body = self._target.body(said, num_tokens=ask.answer_tokens, is_stream=ask.is_stream)
        return Call(session=session, turn=turn, body=body)


async def make_writer(client: EngineClient, workload: Workload, target: Target, scale: Scale | None) -> Writer:
    """Returns a writer that knows how the target counts. Raises `TargetError` where the target does not answer, or
    cannot be asked like this."""
    if target.token_ids is not None and workload.conversations is not None:
        raise TargetError("a conversation goes on with the answer's words: it cannot be had with token ids")
    if target.token_ids is not None:
        ids = Corpus(workload.seed, [str(number) for number in target.token_ids], ",")
        return Writer(target, ids, Scale(), is_measured=True)
    words = Corpus(workload.seed)
    measured = scale or await calibrate(client, target, words)
    return Writer(target, words, measured or UNMEASURED, is_measured=measured is not None)
