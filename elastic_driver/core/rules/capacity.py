"""The number of workers the job aims at, and a note that it has changed.

A rule that changes slots, agents, workers or the number wanted calls `note_change`. `placement` and
`membership` then look once, because looking is O(workers).
"""

from dataclasses import dataclass, field

from elastic_driver.core.events import ScaleRequested
from elastic_driver.core.rules import units
from elastic_driver.core.rules.effects import Effects
from elastic_driver.settings import Settings


@dataclass(slots=True)
class Capacity:
    """The number of workers wanted, and a note of changes since the last look."""

    settings: Settings
    effects: Effects
    target: int | None = None  # asked for; None: max_np
    changed: bool = True  # leavers and agents are to be worked out anew
    placement_due: bool = False  # workers are to be started where there is room
    slots_to_refill: list[tuple[str, int]] = field(default_factory=list)  # before all others

    @property
    def wanted(self) -> int | None:
        """The number of workers to aim at; None: as many as there are slots."""
        return self.settings.max_np if self.target is None else self.target

    def at_most_wanted(self, need: int) -> int:
        """Return `need`, or the number wanted where that is less."""
        return need if self.wanted is None else min(need, self.wanted)

    def on_scale_requested(self, event: ScaleRequested, now: float) -> None:
        """Aim at another number of workers, within the limits."""
        settings = self.settings
        wish = max(event.num_proc, settings.min_np, units.width(settings))
        self.target = wish if settings.max_np is None else min(wish, settings.max_np)
        self.changed = True
        asked = f"{self.target} workers (asked for {event.num_proc})"
        self.effects.announce("scale_requested", asked)

    def note_change(self, vacated: tuple[str, int] | None = None) -> None:
        """Have leavers, agents and free slots worked out anew; refill `vacated` first."""
        self.changed = True
        if vacated is not None:
            self.slots_to_refill.append(vacated)

    def look_taken(self, *, placing: bool) -> None:
        """Note that leavers and agents are worked out; `placing`: workers may be started."""
        self.changed, self.placement_due = False, placing

    def placing_begins(self) -> None:
        """Note that the free slots are looked at now."""
        self.placement_due = False

    def placed(self) -> None:
        """Note that workers were started in the free slots."""
        self.slots_to_refill.clear()
