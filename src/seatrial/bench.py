"""The parent's hand on one candidate: opens its processes, calls it, keeps count.

A candidate that dies costs its process and no more: the next call opens a fresh one. A candidate that
keeps hanging costs two time-outs, one that keeps dying eight processes; after that its remaining calls are
refused here, so that a verdict comes in bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from seatrial.model import CallRecord, Candidate, OutputSlot, Ran, Value
from seatrial.poison import ALL_BITS, NAN

if TYPE_CHECKING:
    from torch import Tensor

    from seatrial.study import Case, Clock, Study
    from seatrial.workers.process import ForkServer, Session

MOST_HANGS = 2
MOST_DEATHS = 8
NO_ANSWER = (Ran.RAISED, Ran.CRASHED, Ran.EXITED, Ran.TIMED_OUT, Ran.OUT_OF_MEMORY)


class Bench:
    """Calls one candidate on cases of one study."""

    def __init__(self, study: Study, candidate: Candidate, server: ForkServer, clock: Clock) -> None:
        self.study = study
        self.candidate = candidate
        self.clock = clock
        self.calls = 0
        self.asked = 0  # calls that a check wanted, refused ones included
        self.unanswered: list[Ran] = []  # per call without a result through the candidate's own doing, how it ended
        self.deaths: list[CallRecord] = []
        self.overruns: list[tuple[Case, CallRecord]] = []  # calls that wrote beyond the ends of a tensor
        self.proven_fault = False  # a check that ran before has rejected the numbers
        self.progress: Callable[[str, float], None] = lambda words, share: None
        self._server = server
        self._session: Session | None = None
        self._load: CallRecord | None = None

    def load(self) -> CallRecord:
        """Open a process for the candidate if there is none; what became of loading it."""
        return self._open().loaded

    def fresh(self) -> None:
        """The next call happens in a process that has never called the candidate."""
        self.close()

    def call(
        self,
        case: Case,
        *,
        inputs: Sequence[Value] | None = None,
        poison: float | None = NAN,
        guard: int = ALL_BITS,
        echo: bool = False,
        same_tensors: bool = False,
    ) -> CallRecord:
        """One call on the inputs of a case (or on others of the same sizes), in fresh tensors or in the last call's."""
        given = self.study.inputs(case) if inputs is None else inputs
        slots = self.study.slots(case.workload)
        asked = {"poison": poison, "guard": guard, "echo": echo, "same_tensors": same_tensors}
        return self._noted(case, self._call(given, slots, **asked))

    def _noted(self, case: Case, record: CallRecord) -> CallRecord:
        if record.facts.get("guards_broken"):
            self.overruns.append((case, record))
        return record

    def _call(self, inputs: Sequence[Value], slots: Sequence[OutputSlot], **asked: Any) -> CallRecord:
        self.asked += 1
        record = self._answer(inputs, slots, **asked)
        ended = self._given_up if record.ran is Ran.LOST else record.ran
        if ended in NO_ANSWER:
            self.unanswered.append(ended)
        return record

    def _answer(self, inputs: Sequence[Value], slots: Sequence[OutputSlot], **asked: Any) -> CallRecord:
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        session = self._open()
        if session.loaded.ran is not Ran.RETURNED:
            return session.loaded
        record = session.call(inputs, slots, **asked)
        self.calls += 1
        if not session.alive:
            self.deaths.append(record)
            self.close()
        return record

    def kernel(self, case: Case) -> Callable[[Sequence[Value]], tuple[Tensor, ...] | None]:
        """The candidate as a function of inputs; None when it gave nothing. Sizes that no input shows are the case's."""

        def call(inputs: Sequence[Value]) -> tuple[Tensor, ...] | None:
            on_the_wire = [v.cpu() if hasattr(v, "cpu") else v for v in inputs]
            record = self._noted(case, self._call(on_the_wire, self.study.slots_for(inputs, case.workload)))
            return record.outputs if record.usable else None

        return call

    def trial_kernel(self) -> Callable[[Sequence[Value]], tuple[Tensor, ...]]:
        """The candidate for a training loop that chooses its own sizes; raises KernelFailed with its words."""
        from seatrial.checks.base import unusable
        from seatrial.trials.kernels import KernelFailed

        def call(inputs: Sequence[Value]) -> tuple[Tensor, ...]:
            record = self._call(inputs, self.study.slots_for(inputs))
            if not record.usable:
                raise KernelFailed(unusable(record))
            return record.outputs

        return call

    def close(self) -> None:
        """End the candidate's process with all its descendants."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _open(self) -> Session:
        if self._session is None:
            self._session = self._server.open(
                self.candidate,
                device=self.study.device.name,
                policy=self.study.policy,
                call_mib=self.study.largest_call_mib,
            )
            if self._session.loaded.ran is Ran.TIMED_OUT:
                self.deaths.append(self._session.loaded)
        return self._session

    @property
    def _given_up(self) -> Ran | None:
        """How the calls ended that made this candidate one that is called no more; None while it is called."""
        if sum(d.ran is Ran.TIMED_OUT for d in self.deaths) >= MOST_HANGS:
            return Ran.TIMED_OUT
        return self.deaths[-1].ran if len(self.deaths) >= MOST_DEATHS else None

    def _refusal(self) -> CallRecord | None:
        if self._given_up is not None:
            return CallRecord(Ran.LOST, error=f"not called: {_why(self._given_up)}, so that its audit comes to an end")
        if self.clock.over:
            return CallRecord(Ran.LOST, error=f"the time budget of {self.clock.budget_s:.0f} s was spent")
        return None


def _why(given_up: Ran) -> str:
    if given_up is Ran.TIMED_OUT:
        return f"after {MOST_HANGS} calls that hung until their deadline a candidate is called no more"
    return f"after {MOST_DEATHS} calls that ended its process a candidate is called no more"
