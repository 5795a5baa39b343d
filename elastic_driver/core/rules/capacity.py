"""The number of workers that the job aims at, and who has asked for it.

A user's figure (`elasticctl scale`, `elasticctl apply`) outranks what `--auto-scale` proposes,
until the user releases it. Rounds that are closed for a request do not count towards
`--reset-limit`.
"""

from dataclasses import dataclass

from msgspec import structs

from elastic_driver.core import events as ev
from elastic_driver.core.driver_events import SizeProposed
from elastic_driver.core.rules import units
from elastic_driver.core.rules.effects import Effects
from elastic_driver.kernel.tables import saved
from elastic_driver.settings import Settings
from elastic_driver.words import counted
from elastic_driver.words import log_events as log


@dataclass(slots=True)
class Capacity:
    """The number of workers that rounds aim at, and a mark that something has changed.

    A rule that changes slots, agents, workers or the number wanted calls `note_change`. `placement`
    and `membership` then look at all workers once, because that is O(workers).
    """

    settings: Settings
    effects: Effects
    target: int | None = saved(None)  # a user's wish; None: there is none
    plan: ev.PlanApplied | None = saved(None)  # of a user, until it is released
    newest_plan: int = saved(0)  # its number; 0: there was none
    proposed: int | None = saved(None)  # what --auto-scale has found so far; None: start_np
    requested: bool = saved(False)  # a change is under way that somebody asked for
    changed: bool = saved(True)  # leavers and agents are out of date
    placement_due: bool = saved(False)  # there may be slots for more workers
    spares_due: bool = saved(False)  # spares may be missing, or too many
    slots_to_refill: list[tuple[str, int]] = saved(factory=list)  # before all others
    unfit: dict[str, str] = saved(factory=dict)  # hosts whose workers do not fit, and why

    @property
    def wanted(self) -> int | None:
        """The number of workers wanted; None: as many as there are slots."""
        if self.target is not None:
            return self.target
        if self.settings.auto_scale:
            size = self.settings.start_np if self.proposed is None else self.proposed
            return self._within_limits(size)
        return self.most

    @property
    def least(self) -> int:
        """The fewest workers that the job trains with; a plan cannot go below --min-np."""
        planned = None if self.plan is None else self.plan.min
        return self._at_least(planned)

    @property
    def most(self) -> int | None:
        """The most workers the job may have; None: as many as there are slots.

        A plan cannot go beyond --max-np.
        """
        planned, most = None if self.plan is None else self.plan.max, self.settings.max_np
        if planned is None or most is None:
            return most if planned is None else planned
        return min(planned, most)

    def _at_least(self, planned: int | None) -> int:
        least, most = self.settings.min_np, self.settings.max_np
        if planned is None:
            return least
        return max(least, planned if most is None else min(planned, most))

    def at_most_wanted(self, need: int) -> int:
        """Return `need`, or the number wanted if that is less."""
        return need if self.wanted is None else min(need, self.wanted)

    def on_scale_requested(self, event: ev.ScaleRequested) -> None:
        """Aim at another number of workers, within the limits; it outranks that of a plan."""
        asked, before = event.num_proc, self.wanted
        if asked is None:
            self.target = self.plan = None
            what = "the number of workers is left to the job again"
        else:
            if self.plan is not None:
                self.plan = structs.replace(self.plan, workers=None, min=None, max=None)
            self.target = self._within_limits(asked)
            what = in_words(self.target)
            if self.target != asked:
                what += f", as {asked} is beyond the limits"
        self._request(before)
        self.effects.announce(log.ScaleRequested(wanted=self.wanted), what)

    def on_plan_applied(self, event: ev.PlanApplied, slots: int) -> None:
        """Aim at the numbers of a plan, which leaves so many slots.

        Raises `StaleEvent` for one that is not newer than all before, or leaves too few.
        """
        if event.number <= self.newest_plan:
            raise ev.StaleEvent(
                f"plan {event.number} is stale: plan {self.newest_plan} was carried out"
            )
        least = self._at_least(event.min)
        if slots < least and (event.min or event.limits_hosts):
            left = counted(slots, "slot")
            raise ev.StaleEvent(f"plan {event.number} leaves {left}, fewer than the {least} needed")
        before = self.wanted
        self.plan, self.newest_plan = event, event.number
        self.target = None if event.workers is None else self._within_limits(event.workers)
        self._request(before)

    def on_size_proposed(self, event: SizeProposed) -> None:
        """Aim at the number of workers that `--auto-scale` proposes, unless a user has chosen."""
        before, self.proposed = self.wanted, self._within_limits(event.num_proc)
        if self.wanted == before:
            return
        self._request(before)
        what = f"{in_words(self.proposed)}: {event.reason}"
        self.effects.announce(log.SizeProposed(wanted=self.proposed), what)

    def _request(self, before: int | None) -> None:
        self.changed = True
        self.unfit.clear()  # the user may have mended the script
        self.requested = self.requested or self.wanted != before

    def hosts_limited(self) -> None:
        """Record that a plan has changed the slots of hosts."""
        self.changed = self.requested = True

    def mark_request_settled(self) -> None:
        """Record that the job has the number of workers that was asked for, or cannot now."""
        self.requested = False

    def _within_limits(self, size: int) -> int:
        least = max(size, self.least, units.width(self.settings))
        return least if self.most is None else min(least, self.most)

    def note_change(self, vacated: tuple[str, int] | None = None) -> None:
        """Have leavers, agents and free slots updated; refill the slot `vacated` first."""
        self.changed = True
        if vacated is not None:
            self.slots_to_refill.append(vacated)

    def does_not_fit(self, host: str, why: str) -> None:
        """Start no more workers on a host: one there could not take over the state."""
        self.unfit[host], self.changed = why, True

    def begin_anew(self) -> None:
        """Record that no worker lives: new ones have no state to take over."""
        self.unfit.clear()

    def mark_settled(self, *, placing: bool) -> None:
        """Record that leavers and agents are up to date; `placing`: workers may be started."""
        self.changed, self.placement_due, self.spares_due = False, placing, True

    def begin_placing(self) -> None:
        """Record that the free slots are filled now."""
        self.placement_due = False

    def mark_spares_settled(self) -> None:
        """Record that the spares are as they have to be."""
        self.spares_due = False

    def mark_placed(self) -> None:
        """Record that workers were started in the free slots."""
        self.slots_to_refill.clear()


def in_words(workers: int) -> str:
    """Return a number of workers as people read it."""
    return counted(workers, "worker")
