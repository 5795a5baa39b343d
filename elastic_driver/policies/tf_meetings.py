"""Barriers and exchanges of one generation of a TensorFlow cluster, identified by their tags.

A tag may be used repeatedly: each member's n-th call belongs to the n-th meeting of that tag. A
meeting that fails, fails for all members: those that wait are answered at once, the others when
they come. Pure: `policies.tf_cluster` calls it; `now` and deadlines are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_driver.policies.messages import Rejection
from elastic_driver.policies.tf_messages import Synchronized, TfAnswer

MAX_TAGS = 4096  # that wait for members at the same time
MAX_HELD_BYTES = 256 * 1024 * 1024  # of values that wait for others
_ANEW = "ask for the next cluster_spec"


@dataclass(slots=True)
class _Meeting:
    deadline: float
    called: set[str] = field(default_factory=set)
    values: dict[str, bytes] = field(default_factory=dict)
    tickets: dict[str, int] = field(default_factory=dict)
    failed: Rejection | None = None


@dataclass(slots=True)
class _Tag:
    calls: dict[str, int] = field(default_factory=dict)  # so far, by member
    meetings: dict[int, _Meeting] = field(default_factory=dict)


class Meetings:
    """All meetings of these members, in the order of their indices."""

    def __init__(self, generation: int, members: Iterable[str]) -> None:
        self._generation, self._members = generation, tuple(members)
        self._tags: dict[str, _Tag] = {}
        self._broken: Rejection | None = None
        self._held = 0  # bytes

    def arrive(
        self,
        ticket: int,
        member: str,
        tag: str,
        *,
        value: bytes,
        failure: str | None,
        deadline: float,
    ) -> list[TfAnswer]:
        """Take in that a member has come to a tag, or its `failure`; return the answers to give."""
        refused = self._broken or self._too_much(tag, value)
        if refused is not None:
            return [TfAnswer(ticket, member, refused)]
        known = self._tags.setdefault(tag, _Tag())
        number = known.calls[member] = known.calls.get(member, 0) + 1
        meeting = known.meetings.setdefault(number, _Meeting(deadline))
        meeting.called.add(member)
        meeting.tickets[member] = ticket
        answers: list[TfAnswer] = []
        if meeting.failed is not None:
            answers = self._answer(meeting, meeting.failed)
        elif failure is not None:
            refusal = Rejection("failed", f"{tag!r} failed: {member} says: {failure}", _ANEW)
            answers = self._fail(meeting, refusal)
        else:
            meeting.values[member] = value
            meeting.deadline = min(meeting.deadline, deadline)
            self._held += len(value)
            if len(meeting.values) == len(self._members):
                values = {name: meeting.values[name] for name in self._members}
                answers = self._answer(meeting, Synchronized(self._generation, values))
                self._drop_values(meeting)
        self._tidy(tag, known)
        return answers

    def gone(self, member: str, why: str) -> list[TfAnswer]:
        """Fail every meeting, now and later: this member will never come again."""
        message = f"{member} {why}, generation {self._generation} cannot meet any more"
        self._broken = Rejection("member_gone", message, _ANEW)
        answers = []
        for known in self._tags.values():
            for meeting in known.meetings.values():
                if meeting.failed is None:
                    answers += self._fail(meeting, self._broken)
        self._tags.clear()
        return answers

    def expire(self, now: float) -> list[TfAnswer]:
        """Fail the meetings whose deadline has passed."""
        answers = []
        for tag, known in self._tags.items():
            for meeting in known.meetings.values():
                if meeting.failed is None and meeting.deadline <= now:
                    missing = [name for name in self._members if name not in meeting.called]
                    message = (
                        f"{tag!r} timed out: {', '.join(missing[:8])} "
                        f"({len(missing)} of {len(self._members)}) did not come"
                    )
                    answers += self._fail(meeting, Rejection("timed_out", message, _ANEW))
        return answers

    def deadline(self) -> float | None:
        """Return when to call `expire` next."""
        waiting = (m for known in self._tags.values() for m in known.meetings.values())
        return min((m.deadline for m in waiting if m.failed is None), default=None)

    # ---- inside --------------------------------------------------------------------------

    def _too_much(self, tag: str, value: bytes) -> Rejection | None:
        if tag not in self._tags and len(self._tags) >= MAX_TAGS:
            return Rejection("too_many_tags", f"{MAX_TAGS} tags wait already", "use tags again")
        if self._held + len(value) > MAX_HELD_BYTES:
            held = f"values of {self._held} bytes wait already"
            return Rejection("too_large", held, "synchronize less at once")
        return None

    def _fail(self, meeting: _Meeting, why: Rejection) -> list[TfAnswer]:
        meeting.failed = why
        self._drop_values(meeting)
        return self._answer(meeting, why)

    def _drop_values(self, meeting: _Meeting) -> None:
        self._held -= sum(map(len, meeting.values.values()))
        meeting.values.clear()

    def _answer(self, meeting: _Meeting, reply: Synchronized | Rejection) -> list[TfAnswer]:
        tickets, meeting.tickets = meeting.tickets, {}
        return [TfAnswer(ticket, member, reply) for member, ticket in tickets.items()]

    def _tidy(self, tag: str, known: _Tag) -> None:
        """Forget meetings to which all have come, and a tag that all have called equally often."""
        for number, meeting in list(known.meetings.items()):
            if len(meeting.called) == len(self._members):
                del known.meetings[number]
        if not known.meetings and len({known.calls.get(m, 0) for m in self._members}) == 1:
            del self._tags[tag]
