"""Why an agent ends, and the parts of it that run until then.

An agent ends when the driver orders it, when a signal asks for it, or when it has no driver any
more (no next one came in time, this host is cut off, the token is unknown, the keys are sealed).

Batch systems and clouds send SIGTERM before they take a machine away, Slurm also what `--signal`
names. The agent reports the first of these signals to the driver, which has the workers leave at a
step boundary and then orders the agent to end. Shortly before the time is over, the agent stops the
workers that are still here. More of these signals are about the same leaving: they come from Slurm,
from the process that keeps the agent and passes them on, and again. Times are seconds.
"""

import asyncio
import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from elastic_driver.errors import ExitCode
from elastic_driver.words import orders as documents
from elastic_driver.words.wire_events import HostLeaving
from launcher.agent.command_line import AgentConfig
from launcher.agent.driver_link import DriverLink, NoDriverError
from launcher.agent.liveness import CutOffError
from launcher.agent.workers import Workers
from launcher.edge import TO_LEAVE
from rendezvous.errors import RendezvousError

ORPHAN_GRACE_S = 5.0  # for workers whose driver is gone, or whose agent got a signal


class Lifetime:
    """The life of one agent on the running loop, until it has a reason to end.

    The agent sets `link` and `workers` once it has them. `notice`: the seconds in which it leaves
    in good order after a signal; 0: a signal ends it at once. `say` shows a sentence;
    `on_driver_gone` is called when there will be no driver any more.
    """

    def __init__(
        self,
        config: AgentConfig,
        say: Callable[[str], None],
        on_driver_gone: Callable[[], None],
    ) -> None:
        self.link: DriverLink | None = None
        self.workers: Workers | None = None
        self.notice = 0.0
        self.reason = ""
        self.exit_code = 0
        self.driver_gone = False
        self.waited_in_vain = False  # for the next driver
        self._config = config
        self._say = say
        self._on_driver_gone = on_driver_gone
        self._over = asyncio.Event()  # set with the reason, the status, and the driver's state
        self._tasks: list[asyncio.Task[None]] = []
        self._leave_timer: asyncio.TimerHandle | None = None  # runs after `_announce`

    @property
    def is_over(self) -> bool:
        """True once there is a reason to end."""
        return self._over.is_set()

    async def until_over(self) -> None:
        """Wait for a reason to end."""
        await self._over.wait()
        if self._leave_timer is not None:
            self._leave_timer.cancel()

    async def end_tasks(self) -> None:
        """End what `spawn` has begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def listen(self) -> None:
        """Watch the reasons to end on the running loop."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in (signal.SIGINT, signal.SIGHUP, *TO_LEAVE):
            loop.add_signal_handler(number, self._on_signal, number)
        if self._config.lifeline:
            loop.add_reader(0, self._on_lifeline)

    def _on_signal(self, number: signal.Signals) -> None:
        """Leave in good order if the signal announces the end of the host; otherwise end."""
        if number not in TO_LEAVE:
            self.end(f"got {number.name}", 128 + number, ORPHAN_GRACE_S)
        elif not self.is_over and self._leave_timer is None:
            if self.notice:
                self._announce(number)
            else:
                self.end(f"got {number.name}", 128 + number, ORPHAN_GRACE_S)

    def _announce(self, number: signal.Signals) -> None:
        """Report that this host goes away, and end in time even if the driver does nothing.

        If there is no driver, the workers leave by themselves.
        """
        notice = self.notice
        patience = documents.time_to_leave(self.notice)
        reason = f"its agent got {number.name}"
        if self.link is not None:
            agent = self._config.host, self._config.incarnation
            self.link.report(HostLeaving(*agent, notice, reason))
        self._say(f"got {number.name}: leaving this host within {notice:g} s")
        if self.link is not None and self.link.absent:
            self.end(f"got {number.name} without a driver", 128 + number, 0.0, notice=notice)
            return
        late = f"got {number.name}, and workers were still here {patience:g} s later"
        loop = asyncio.get_running_loop()
        self._leave_timer = loop.call_later(
            patience, self.end, late, 128 + number, notice - patience
        )

    def _on_lifeline(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                asyncio.get_running_loop().remove_reader(0)
                link, why = self.link, "its pipe to us has closed"
                if self.workers is not None:
                    self.workers.read_nothing()
                if self._config.kept or link is None or not link.waits:
                    self._lose_driver(why)
                elif not self.is_over:
                    link.driver_died(why)

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._say_trace(error)
        self.end(f"a bug of ours: {context.get('message')}", ExitCode.BUG, 0.0)

    def _lose_driver(self, why: str, grace: float = ORPHAN_GRACE_S, notice: float = 0.0) -> None:
        reason = f"the driver is gone: {why}"
        self.end(reason, ExitCode.UNAVAILABLE, grace, driver_gone=True, notice=notice)

    def end(
        self,
        reason: str,
        exit_code: int,
        grace: float,
        *,
        driver_gone: bool = False,
        notice: float = 0.0,
        interrupt: bool = False,
    ) -> None:
        """Begin to end: workers leave within `notice` seconds, or are killed in `grace` seconds.

        `interrupt`: they get SIGINT before SIGTERM.
        If it is called again, the shorter time counts, and the first reason unless the driver is
        gone.
        """
        if driver_gone or not self.is_over:
            self.reason = reason
            self.exit_code = int(exit_code)
            self.driver_gone = driver_gone
        self._over.set()
        if driver_gone:  # also for a driver that comes now
            self._on_driver_gone()
            for task in self._tasks:
                task.cancel()
        if self.workers is not None and notice:
            self.workers.leave(notice)
        elif self.workers is not None:
            self.workers.stop_all(grace, interrupt=interrupt)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the agent until it ends."""
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the agent; its failure is the agent's end."""
        try:
            await work
        except CutOffError as error:  # the others train on without our workers
            self._lose_driver(str(error), grace=0.0)
        except NoDriverError as error:
            self.waited_in_vain = True
            self._lose_driver(str(error), notice=self.notice)
        except RendezvousError as error:
            self._lose_driver(str(error))
        except Exception as error:
            self._say_trace(error)
            self.end(f"a bug of ours: {error!r}", ExitCode.BUG, 0.0)

    def _say_trace(self, error: BaseException) -> None:
        for line in "".join(traceback.format_exception(error)).splitlines():
            self._say(line)
