"""A job and the Brain of its cluster: reports go out, grants come in; a Brain may be away.

`BrainLink` has two threads: one renews the job's lease and waits for grants, in one request; the
other one sends the newest report, each second and whenever it has changed. Neither ever holds the
driver up. While the Brain is away both try again and again; the job keeps its slots meanwhile.

`BrainReports` makes the reports in the driver's thread. A slot counts as held while a process there
is not known to be gone. The workers of a host that cannot be reached are written off by the job,
but they may live on there: they count until they have ended by themselves. Times are seconds.
"""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from elastic_driver.brain.grants import (
    JOB_LEASE_S,
    MOST_WORKERS,
    Grant,
    JobOver,
    JobReport,
    Kind,
    grant_key,
    lease_key,
)
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import UsageError
from elastic_driver.job.events import HostsGranted
from elastic_driver.job.job import Job
from elastic_driver.job.workers import OCCUPYING
from elastic_driver.runtime.driver_parts import Watch, progress_of, speed_of
from elastic_driver.runtime.endpoint import LivenessPort
from elastic_driver.words.orders import JobSpec
from rendezvous import wire
from rendezvous.client import RendezvousClient
from rendezvous.errors import (
    AbortedError,
    RendezvousError,
    RequestError,
    UnauthorizedError,
    UnreachableError,
)
from rendezvous.wire import UNREADABLE, Entries, Get, Set, Written, expect

POLL_S = 3.0  # of one question for grants
ANSWER_S = 3.0  # for an answer, beside that wait
REPORT_S = 1.0  # between two reports that say the same
AGAIN_S = 0.5  # before the next attempt after one that failed
OVER_S = 3.0  # for the Brain to take the news of the job's end
_SLICE_S = 0.25  # the longest time until a signal is handled

_decode_grant = msgspec.json.Decoder(Grant).decode


class BrainLink:
    """Reports one job to the Brain, and hands over the job's grants.

    `say` shows a sentence to the user; any thread calls it. The link begins with the first report
    (`update`). `attach` takes the grants from the newest one on. The file `alive` is touched every
    few seconds, so that the next driver knows until when this one lived. `ports`: see
    `LivenessPort`.
    """

    def __init__(
        self,
        client: RendezvousClient,
        job: str,
        say: Callable[[str], None],
        alive: Path | None = None,
        ports: Sequence[int] = (0,),
    ) -> None:
        self._client, self._job, self._say, self._alive = client, job, say, alive
        url = urlsplit(client.url)
        self._liveness = LivenessPort(url.hostname or "", url.port or 0, client.token, ports)
        self._report: JobReport | None = None
        self._grant: Grant | None = None  # the newest
        self._take: Callable[[Grant], None] | None = None
        self._refusal: UsageError | None = None  # the Brain's answer, until it takes our token
        self._away = self._reached = False
        self._news = threading.Condition()  # guards all of the above
        self._changed, self._closing = False, False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("brain-grants", self._ask), ("brain-reports", self._tell))
        ]

    @property
    def url(self) -> str:
        """The address of the Brain."""
        return self._client.url

    @property
    def answers(self) -> bool:
        """Return whether the Brain has answered, and is not away now."""
        return self._reached and not self._away

    # ---- life ----------------------------------------------------------------------------

    def update(self, report: JobReport) -> None:
        """Send this report from now on; at once if it says anything new."""
        with self._news:
            first, new = self._report is None, report != self._report
            if self._closing or not new:
                return
            self._report, self._changed = report, True
            self._news.notify_all()
        for thread in self._threads if first else ():
            thread.start()

    def first_grant(self, within: float, after: int = 0) -> Grant | None:
        """Wait until the job may use slots; None if that takes longer.

        Grants up to the number `after` do not count. Raises UsageError if the Brain refuses the
        token or the job.
        """
        until, told = time.monotonic() + within, after
        while (left := until - time.monotonic()) > 0:
            with self._news:
                if self._refusal is not None:
                    raise self._refusal
                if (grant := self._grant) is None or grant.number <= told:
                    self._news.wait(min(left, _SLICE_S))
                    continue
            if grant.hosts:
                return grant
            told = grant.number
            self._say(f"the job waits for slots of the Brain: {grant.reason}")
        return None

    def attach(self, take: Callable[[Grant], None]) -> None:
        """Have `take` called with the newest grant, if there is one, and each later one."""
        with self._news:
            self._take = take
            if self._grant is not None:
                take(self._grant)

    def end(self, over: JobOver | None) -> None:
        """End the link, and tell the Brain that the job is over, if it is. May be called again."""
        with self._news:
            if self._closing:
                return
            self._closing = True
            self._news.notify_all()
        if any(thread.ident is not None for thread in self._threads):
            self._client.abort()
            for thread in self._threads:
                thread.join(OVER_S)
        if over is not None and self._reached:
            last = self._client.clone(OVER_S)
            try:
                last.post_json(EVENTS_PATH, msgspec.json.encode(over), OVER_S)
            except RendezvousError as error:
                self._say(f"the Brain does not know yet that this job is over ({error})")
            finally:
                last.close()
        self._client.close()
        self._liveness.close()

    # ---- the threads ---------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        while not self._closing:
            self._note_life()
            try:
                work()
            except AbortedError:
                return
            except (UnauthorizedError, RequestError) as error:
                self._refused(error)
            except RendezvousError as error:
                if work == self._ask:  # one of the two says whether the Brain is there
                    self._missed(error)
            else:
                continue
            with self._news:
                self._news.wait_for(lambda: self._closing, AGAIN_S)

    def _ask(self) -> None:
        """Renew the lease and ask for grants until an attempt fails."""
        lease, key = Set(lease_key(self._job), lease=JOB_LEASE_S), grant_key(self._job)
        seen, wait = 0, 0.0  # the first answer comes at once: it shows that the Brain is there
        while not self._closing:
            asked = lease, wire.Watch({key: seen}, wait=wait), Get((key,))
            answers = self._client.batch(*asked, deadline=wait + ANSWER_S)
            wait = POLL_S
            self._note_life()
            expect(answers[0], Written)
            entry = expect(answers[2], Entries).entries.get(key)
            self._heard()
            if entry is not None:
                seen = entry.revision
                self._hand_over(entry.value)

    def _note_life(self) -> None:
        if self._alive is not None:
            with contextlib.suppress(OSError):  # then the journal has to do
                self._alive.touch()

    def _tell(self) -> None:
        """Send reports until an attempt fails."""
        while not self._closing:
            with self._news:
                report, self._changed = self._report, False
            if report is not None:
                self._liveness.open(report.began)
                report = replace(report, liveness=self._liveness.address)
            self._client.post_json(EVENTS_PATH, msgspec.json.encode(report), ANSWER_S)
            with self._news:
                self._reached = True
                self._news.wait_for(lambda: self._changed or self._closing, REPORT_S)

    def _hand_over(self, value: bytes) -> None:
        try:
            grant = _decode_grant(value)
        except UNREADABLE as error:
            self._say(f"the Brain's grant cannot be read ({error}); the job keeps its slots")
            return
        with self._news:
            if self._report is None or grant.began not in (0.0, self._report.began):
                return  # it is for an earlier run of this job
            if self._grant is None or grant.number > self._grant.number:
                self._grant = grant
                if self._take is not None:
                    self._take(grant)
                self._news.notify_all()

    # ---- presence ------------------------------------------------------------------------

    def _heard(self) -> None:
        with self._news:
            back, self._away, self._reached, self._refusal = self._away, False, True, None
        if back:
            self._say(f"the Brain at {self.url} is back")

    def _missed(self, error: RendezvousError) -> None:
        with self._news:
            new, self._away = not (self._away or self._closing), True
        if new:
            why = error.cause if isinstance(error, UnreachableError) else error
            meanwhile = "the job keeps its slots, and does not grow until it is back"
            if self._take is None:
                meanwhile = "the job waits for it"
            self._say(f"the Brain at {self.url} is away; {meanwhile} ({why})")

    def _refused(self, error: UnauthorizedError | RequestError) -> None:
        if isinstance(error, RequestError) and error.status in (429, 503):
            return  # it has too much to do now, and is asked again
        hint = "see that the token file is this Brain's, and names this job"
        if isinstance(error, UnauthorizedError) or error.status == 403:
            found = UsageError(f"the Brain at {self.url} refused the token; {hint}")
        elif error.code == "http_error":
            found = UsageError(f"no Brain answers at {self.url}; does elasticbrain listen there?")
        else:
            found = UsageError(f"the Brain at {self.url} refused the job {self._job}: {error}")
        with self._news:
            new, self._refusal = self._refusal is None and self._reached, found
            self._news.notify_all()
        if new:
            self._say(f"the job keeps its slots, and does not grow: {found}")


# ---- the job as the Brain wants to know it -------------------------------------------------


LOOK_S = 0.1  # between two looks at the job


@dataclass(kw_only=True)
class BrainReports:
    """Looks at the job now and then, and hands each report to the link."""

    link: BrainLink
    began: float  # unix seconds; tells this run from others of its name
    weight: float
    kind: Kind
    lives_on: float  # for so long workers live without a driver or a network
    _looked: float = float("-inf")
    _seen: dict[str, int] = field(default_factory=dict)  # slots with a process, when last looked
    _doubtful: dict[str, tuple[int, float]] = field(default_factory=dict)  # slots, until when

    def first(self, least: int, most: int | None, held: int | None = None) -> JobReport:
        """Return the report of a job without workers: it asks for slots."""
        return JobReport(
            began=self.began,
            least=least,
            most=most,
            held=held,
            weight=self.weight,
            lives_on=self.lives_on,
            kind=self.kind,
        )

    def look(self, job: Job, watch: Watch, now: float) -> None:
        """Report how the job is now, unless that was done a moment ago."""
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        self.kind = kind_seen(self.kind, job, watch)
        capacity = job.capacity
        report = JobReport(
            began=self.began,
            least=capacity.least,
            most=capacity.most,
            weight=self.weight,
            held=capacity.target,
            carried_out=job.inventory.newest_grant,
            receipt=job.inventory.receipt,
            holding=self._holding(job, now),
            lives_on=self.lives_on,
            memory_need=job.limits.memory_need,
            room=_bounded(job.limits.memory_room()),
            starved=dict(job.limits.fewer),
            planned=_bounded(job.limits.planned()),
            kind=self.kind,
            speed=speed_of(job, watch),
        )
        self.link.update(report)

    def event_of(self, grant: Grant) -> HostsGranted:
        """Return the event of a grant for the job's machine."""
        hosts = tuple(grant.hosts.items())
        return HostsGranted(
            grant.number, hosts, grant.reason, self.began, grant.too_small, grant.receipt
        )

    def end(self, exit_code: int | None) -> None:
        """End the link; tell the Brain that the job is over, if its processes are gone.

        None: another driver goes on with the job.
        """
        over = (
            None
            if exit_code is None or self._doubtful
            else JobOver(began=self.began, exit_code=exit_code)
        )
        self.link.end(over)

    def _holding(self, job: Job, now: float) -> dict[str, int]:
        """Return the slots with a process that is not known to be gone, by host."""
        holding = dict(Counter(worker.host for worker in job.workers.having(*OCCUPYING)))
        for host, slots in self._seen.items():
            if job.hosts.is_lost(host) and host not in self._doubtful:
                self._doubtful[host] = slots, now + self.lives_on
        self._seen = dict(holding)
        for host, (slots, until) in list(self._doubtful.items()):
            if until <= now:
                del self._doubtful[host]
            else:
                holding[host] = max(slots, holding.get(host, 0))
        return holding


def _bounded(workers: dict[str, int]) -> dict[str, int]:
    """Return the numbers of workers as a report may have them: a worker may need very little."""
    return {host: min(most, MOST_WORKERS) for host, most in workers.items()}


def kind_of(spec: JobSpec) -> Kind:
    """Return what a job trains, as far as its command says it."""
    digest = hashlib.sha256(msgspec.json.encode(spec.command)).hexdigest()
    return Kind(name=spec.run_id[:255], command=digest)


def kind_seen(kind: Kind, job: Job, watch: Watch) -> Kind:
    """Return what a job trains, with what its workers have said of the model and the batch."""
    progress = progress_of(job, watch)
    if progress is None or progress.parameters is None:
        return kind
    return replace(kind, parameters=progress.parameters, batch=progress.batch)
