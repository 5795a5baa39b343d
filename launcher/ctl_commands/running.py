"""The subcommands for a running job: status, top, events, logs, stacks, scale, apply and others.

`run` parses the words of a subcommand, finds the job and calls the function of that name. A
description in `--help` is the function's docstring.

`elasticctl logs` asks the driver of a job that runs page by page. When it does not answer any more,
or the job is over, the files in the run's folder are read, from the same place on.
"""

import argparse
import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.options import SECONDS_OR_0, ValueKind, whole, whole_or
from elastic_driver.runtime.results import read_result
from elastic_driver.runtime.run_dir import EVENTS_FILE, OUTPUT_FOLDER, default_state_dir
from elastic_driver.runtime.worker_logs import LogLine, LogPage, LogQuery, read_page
from elastic_driver.words import counted
from elastic_driver.words.orders import LoginCode
from launcher.ctl_commands import job_text, orders
from launcher.ctl_commands.find import Where, find, run_folder
from launcher.ctl_commands.orders import ask_stacks, read_events, read_plan
from rendezvous.auth import Role
from rendezvous.client import RendezvousClient
from rendezvous.errors import RequestError, UnreachableError

TIMEOUT_S = 10.0
SILENCE_S = 60.0  # in a stream; the driver sends a comment every 15 s
_STEERING = ("open", "stacks", "scale", "apply", "drain", "stop")  # need an operator's token
_CLEAR = "\x1b[H\x1b[2J"  # cursor home, erase the screen (ECMA-48)

Given = argparse.Namespace
Job = RendezvousClient


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` for a wrong command."""

    @property
    def actions(self) -> list[argparse.Action]:
        """The arguments, in the order in which they were added."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _reader(kind: ValueKind[Any]) -> Callable[[str], Any]:
    """Return the reader of an option's value in the form that argparse takes."""

    def read(word: str) -> Any:
        try:
            return kind.read(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


_SECONDS = _reader(SECONDS_OR_0)
_COUNT = _reader(whole())
_COUNT_OR_AUTO = _reader(whole_or("auto", 1))
# The arguments of argparse's add_argument: names, and the rest.
_FLAG = {"action": "store_true"}
_YES = {**_FLAG, "help": "do not ask, even if the job cannot go on then"}
_WHICH_JOB: dict[str, dict[str, Any]] = {
    "--run-id": {"metavar": "ID", "help": "the job's name"},
    "--endpoint": {"metavar": "URL", "help": "the address of the job's driver"},
    "--token-file": {"metavar": "F", "type": Path, "help": "the file with the job's token"},
    "--state-dir": {"metavar": "D", "type": Path, "help": "the folder of all runs"},
    "--journal": {"metavar": "etcd://…", "help": "the etcd that knows the driver of --run-id"},
}
_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "status": {
        "--json": {**_FLAG, "help": "print the driver's own document"},
        "--all": {**_FLAG, "help": "a row for each host and worker, also of more than 50"},
        "--watch": {**_FLAG, "help": "print it again and again, until the job is over"},
        "--interval": {"type": _SECONDS, "default": 2.0, "metavar": "S", "help": "default 2 s"},
    },
    "top": {
        "--interval": {"type": _SECONDS, "default": 2.0, "metavar": "S", "help": "default 2 s"}
    },
    "open": {},
    "hosts": {"--json": {**_FLAG, "help": "print a JSON array"}},
    "events": {
        "-f --follow": {**_FLAG, "help": "go on until the job is over"},
        "--since": {"type": _COUNT, "default": 0, "metavar": "N", "help": "start after event N"},
        "--json": {**_FLAG, "help": "print one JSON object a line"},
    },
    "logs": {
        "-f --follow": {**_FLAG, "help": "go on until the job is over"},
        "--rank": {"type": _COUNT, "metavar": "R", "help": "what was written as this rank"},
        "--worker": {"metavar": "W", "help": "of this worker, as elasticctl status names it"},
        "--host": {"metavar": "H", "help": "of the workers on this host"},
        "--since": {"type": _SECONDS, "metavar": "S", "help": "of the last S seconds"},
        "--tail": {"type": _COUNT, "metavar": "N", "help": "the last N lines; not with -f"},
        "--timestamps": {**_FLAG, "help": "put time and worker in front of each line"},
        "--json": {**_FLAG, "help": "print one JSON object a line"},
    },
    "stacks": {"--last": {**_FLAG, "help": "show those collected last, as at a hang"}},
    "scale": {
        "workers": {
            "type": _COUNT_OR_AUTO,
            "metavar": "N",
            "help": "the number of workers; auto: leave it to the job again",
        },
        "--yes": _YES,
    },
    "apply": {
        "plan": {
            "metavar": "PLAN.yaml",
            "type": Path,
            "help": "workers, or min and max; slots_per_host; cpu_per_worker; memory_per_worker",
        },
    },
    "drain": {
        "host": {"metavar": "HOST", "help": "its name, as elasticctl hosts shows it"},
        "--reason": {"default": "elasticctl drain", "help": "for the event log"},
        "--deadline": {"type": _SECONDS, "metavar": "S", "help": "seconds to leave it"},
        "--cancel": {**_FLAG, "help": "allow new workers on it again"},
        "--yes": _YES,
    },
    "stop": {"--reason": {"default": "elasticctl stop", "help": "for the event log"}},
}
_EXAMPLES = {
    "status": "status --watch --interval 5",
    "events": "events -f --since 100",
    "logs": "logs -f --rank 0 --since 60 --timestamps",
    "top": "top --interval 1",
    "open": "open --run-id nightly",
    "stacks": "stacks --last",
    "scale": "scale 8",
    "apply": "apply plan.yaml",
    "drain": "drain n3 --deadline 120 --reason 'new disks'",
    "stop": "stop --run-id nightly",
}


def make_parser(name: str) -> CommandParser:
    """Return the parser of a subcommand."""
    text = " ".join(str(ACTIONS[name].__doc__).split())
    example = f"Example: elasticctl {_EXAMPLES[name]}" if name in _EXAMPLES else None
    parser = CommandParser(
        prog=f"elasticctl {name}", description=text, epilog=example, allow_abbrev=False
    )
    which = parser.add_argument_group("which job (default: the only one running)")
    for group, arguments in ((parser, _ARGUMENTS[name]), (which, _WHICH_JOB)):
        for names, rest in arguments.items():
            group.add_argument(*names.split(), **rest)
    return parser


def run(name: str, words: Sequence[str]) -> int:
    """Run a subcommand with these words; return the exit status.

    A request is tried once. If the driver refuses it, the error has the driver's own words.
    """
    action = ACTIONS[name]
    given = make_parser(name).parse_args([_hyphenated(word) for word in words])
    given.state_dir = state_dir = (given.state_dir or default_state_dir(os.environ)).absolute()
    given.where = Where(
        state_dir, given.run_id, given.endpoint, given.token_file, given.journal, _role(name, given)
    )
    try:
        job = find(given.where)
    except ClusterError as error:
        if name in ("logs", "events"):
            (_logs_of_run if name == "logs" else _events_of_run)(given, error)
            return 0
        ended = read_result(state_dir / given.run_id / EVENTS_FILE) if given.run_id else None
        if name != "status" or ended is None:
            raise
        text = (
            msgspec.json.encode(ended).decode()
            if given.json
            else job_text.ended(ended, time.time())
        )
        print(text if given.json else f"run {given.run_id} {text}")
        return 0
    given.run_id = job.run_id
    try:
        with job.client(TIMEOUT_S) as client:
            action(given, client)
    except RequestError as error:
        if error.code == "http_error":  # not an answer of a driver
            raise
        text = f"{error.message}; {error.hint}" if error.hint else error.message
        raise (UsageError if error.status < 500 else ClusterError)(text) from error
    return 0


def _role(name: str, given: Given) -> Role:
    """Return the role whose token is enough."""
    steers = name in _STEERING and not (name == "stacks" and given.last)
    return Role.OPERATOR if steers else Role.READER


def _hyphenated(word: str) -> str:
    """Return `--run_id` as `--run-id`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


# ---- show --------------------------------------------------------------------------------


def status(given: Given, job: Job) -> None:
    """Show the job, its hosts and its workers; of a run that is over, the end of each worker."""
    document = job.get_bytes(contract.STATUS_PATH)
    while True:
        text = (
            document.decode()
            if given.json
            else job_text.status(document, time.time(), every=given.all)
        )
        clear = _CLEAR if given.watch and sys.stdout.isatty() else ""
        print(f"{clear}{text}", flush=True)
        if not given.watch:
            return
        time.sleep(given.interval)
        try:
            document = job.get_bytes(contract.STATUS_PATH)
        except (RequestError, UnreachableError):
            print(f"run {given.run_id} does not answer any more", file=sys.stderr)
            return


def top(given: Given, job: Job) -> None:
    """Show the job live, with keys to order the workers, drain a host and see the stacks.

    Where stdout or stdin is no terminal, it is the same as `status --watch`.
    """
    given.json = False
    given.all = False
    given.watch = True
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        status(given, job)
        return
    from launcher.ctl_commands import top as screen  # noqa: PLC0415 - imports rich

    where = dataclasses.replace(given.where, role=Role.OPERATOR)
    try:
        with find(where).client(TIMEOUT_S) as steering:
            screen.watch(screen.Remote(job, steering), given.interval)
    except (RequestError, UnreachableError):
        print(f"run {given.run_id} does not answer any more", file=sys.stderr)


def open_page(given: Given, job: Job) -> None:
    """Print an address at which a browser shows the job and, with an operator's token, steers it.

    It logs in one browser, within five minutes; the part after # never reaches a server or a log.
    """
    try:
        made = msgspec.json.decode(job.post_json(contract.LOGIN_CODES_PATH, b"{}"), type=LoginCode)
    except RequestError as error:
        if error.status != 403:
            raise
        print(f"{job.url}/")
        print(f"run {given.run_id}: log in there with your token", file=sys.stderr)
    else:
        print(f"{job.url}/#code={made.code}")
        print(
            f"run {given.run_id}: good for one login within {made.seconds:.0f} s", file=sys.stderr
        )
    if hint := _forwarding(job.url, os.environ.get("SSH_CONNECTION", "")):
        print(hint, file=sys.stderr)


def _forwarding(url: str, connection: str) -> str:
    """Return how a browser at the other end of an ssh connection reaches this address, or ""."""
    there = urlsplit(url)
    if there.hostname not in ("127.0.0.1", "localhost", "::1") or len(connection.split()) != 4:
        return ""
    here = connection.split()[2]  # ssh(1): the client's address and port, the server's, its port
    return f"first, on the machine with the browser: ssh -L {there.port}:{there.netloc} {here}"


def hosts(given: Given, job: Job) -> None:
    """Show the job's hosts."""
    document = job.get_bytes(contract.STATUS_PATH)
    found = job_text.hosts(job_text.read_job(document))
    if given.json:
        print(msgspec.json.encode(msgspec.json.decode(document)["hosts"]).decode())
    else:
        print(found)


def events(given: Given, job: Job) -> None:
    """Show the events of the job: those so far, and with -f those to come.

    Without a job that runs, it is the newest run below the state directory, or the one of --run-id.
    """
    path = f"{EVENTS_PATH}?since={given.since}"
    lines = job.follow(path, SILENCE_S) if given.follow else read_events(job, given.since)
    for line in lines:
        print(line.decode() if given.json else job_text.event(line), flush=True)


def _events_of_run(given: Given, reason: ClusterError) -> None:
    """Show the events of a run that is over; raises `reason` if there is no such run."""
    run = None if given.endpoint is not None else run_folder(given.state_dir, given.run_id)
    if run is None or not (log := run / EVENTS_FILE).is_file():
        raise reason
    with log.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # a line that was cut off
                if job_text.read_event(line).n > given.since:
                    print(line.decode().rstrip() if given.json else job_text.event(line))


def logs(given: Given, job: Job) -> None:
    """Show what the workers have written, as far as it is kept (--keep-output), oldest first.

    --rank R follows a rank: each line counts for the rank that its worker had then. Without a job
    that runs, it is the newest run below the state directory, or the one of --run-id.
    """
    _logs_of_job(given, job)


def stacks(given: Given, job: Job) -> None:
    """Show the stack of every rank's training thread.

    Ranks with the same stack stand together, the odd ones first. A worker that cannot answer is
    examined from outside, with py-spy if it is installed. No worker is stopped for it.
    """
    if given.last:
        known = map(job_text.read_event, read_events(job))
        found = [event for event in known if event.event == job_text.STACKS_COLLECTED]
        if not found:
            raise ClusterError("no stacks were collected yet; omit --last to collect them now")
        print(job_text.stacks(found[-1]))
        return
    last = ask_stacks(job, "elasticctl stacks")
    for line in job.follow(f"{EVENTS_PATH}?since={last}", SILENCE_S):
        event = job_text.read_event(line)
        if event.event == job_text.STACKS_COLLECTED:
            print(job_text.stacks(event))
            return
    raise ClusterError(f"run {given.run_id} ended before its workers had answered")


# ---- logs -------------------------------------------------------------------------------

POLL_S = 0.5  # between two questions for new lines
Fetch = Callable[[LogQuery], LogPage]
_decode = msgspec.json.Decoder(LogPage).decode


def _logs_of_job(given: argparse.Namespace, job: RendezvousClient) -> None:
    """Print the lines of a job that runs; with -f until it is over."""

    def ask(query: LogQuery) -> LogPage:
        asked = {name: x for name, x in msgspec.structs.asdict(query).items() if x is not None}
        return _decode(job.get_bytes(f"{contract.LOGS_PATH}?{urlencode(asked)}"))

    folder = given.state_dir / given.run_id / OUTPUT_FOLDER
    _print(given, _lines(given, ask, folder))


def _logs_of_run(given: argparse.Namespace, reason: ClusterError) -> None:
    """Print the lines of a run that is over: that of --run-id, or the newest.

    Raises `reason`, for which there is no driver to ask, if there is no such run.
    """
    run = None if given.endpoint is not None else run_folder(given.state_dir, given.run_id)
    if run is None or not (output := run / OUTPUT_FOLDER).is_dir():
        raise reason
    given.follow = False
    _print(given, _lines(given, lambda query: read_page(output, query), output))


def _lines(given: argparse.Namespace, fetch: Fetch, folder: Path) -> Iterator[LogLine]:
    """Yield the wanted lines; those that come later too, with -f."""
    since = None if given.since is None else time.time() - given.since
    query = LogQuery(None, given.rank, given.worker, given.host, since)
    while True:
        try:
            page = fetch(query)
        except (RequestError, UnreachableError):
            if query.at is None:  # it has never answered
                raise
            given.follow = False
            fetch = partial(read_page, folder)
            continue
        yield from page.lines
        query = msgspec.structs.replace(query, at=page.next)
        if not page.more:
            if not given.follow:
                return
            time.sleep(POLL_S)


def _print(given: argparse.Namespace, lines: Iterable[LogLine]) -> None:
    if given.tail is not None and not given.follow:
        lines = collections.deque(lines, maxlen=given.tail)
    count = 0
    for count, line in enumerate(lines, 1):  # noqa: B007 - the number of all lines
        print(_text(given, line), flush=given.follow)
    if not count:
        print("elasticctl: no worker has written such a line", file=sys.stderr)


def _text(given: argparse.Namespace, line: LogLine) -> str:
    """Return a line as elasticrun shows it; with the time and the worker if they are wanted."""
    if given.json:
        return msgspec.json.encode(line).decode()
    said = f"[{'-' if line.rank < 0 else line.rank}]<{line.stream}>:{job_text.cleaned(line.text)}"
    owner = line.worker or line.host
    return f"{job_text.clock(line.t)} {owner} {said}" if given.timestamps else said


# ---- act ---------------------------------------------------------------------------------


def scale(given: Given, job: Job) -> None:
    """Ask for another number of workers, within --min-np and --max-np.

    It holds until `scale auto`: then the job has --max-np workers, or what --auto-scale finds.

    On a terminal you are asked first if there are not enough slots for them.
    """
    known = job_text.read_job(job.get_bytes(contract.STATUS_PATH))
    asked = given.workers
    if asked is not None and (known.max_np is None or asked <= known.max_np):
        # The driver refuses others.
        orders.confirm(orders.cost_of_scale(known, given.workers), yes=given.yes)
    job.post_json(contract.SCALE_PATH, msgspec.json.encode({"num_proc": given.workers}))
    what = (
        f"asked for {counted(asked, 'worker')}"
        if asked
        else "the number of workers is the job's own again"
    )
    print(f"run {given.run_id}: {what}")


def apply(given: Given, job: Job) -> None:
    """Change the running job as PLAN.yaml says; it replaces the plan before.

    The file has workers, or min and max, within --min-np and --max-np; slots_per_host: the most
    workers on each host; cpu_per_worker and memory_per_worker (8GiB): a host gets no more workers
    than it has enough for. Its number, if it has one, must be higher than that of each plan before.

    A plan outranks --auto-scale until `elasticctl scale auto`.
    """
    newest = job_text.read_job(job.get_bytes(contract.STATUS_PATH)).plan
    plan = read_plan(given.plan, newest)
    said = {name: value for name, value in msgspec.structs.asdict(plan).items() if value}
    job.post_json(contract.PLAN_PATH, msgspec.json.encode(said))
    now = job_text.read_job(job.get_bytes(contract.STATUS_PATH))
    if now.plan < plan.number:
        raise UsageError(now.ignored)
    print(f"run {given.run_id}: {plan}")


def drain(given: Given, job: Job) -> None:
    """Make HOST's workers leave at a step boundary; they are replaced first if there is room.

    HOST gets no workers until it disappears from the discovery and comes back, or until --cancel.
    On a terminal you are asked first if the job cannot go on without it.
    """
    if not given.cancel:
        known = job_text.read_job(job.get_bytes(contract.STATUS_PATH))
        orders.confirm(orders.cost_of_drain(known, given.host), yes=given.yes)
    body = {"reason": given.reason}
    if given.deadline is not None and not given.cancel:
        body["deadline"] = given.deadline
    path = contract.UNDRAIN_PATH if given.cancel else contract.DRAIN_PATH
    job.post_json(path.format(host=quote(given.host, safe="")), msgspec.json.encode(body))
    what = "may be used again" if given.cancel else "is being drained"
    print(f"run {given.run_id}: host {given.host} {what}")


def stop(given: Given, job: Job) -> None:
    """End the job; elasticrun returns 143.

    Workers get SIGTERM, and SIGKILL after --stop-grace; a second stop kills them at once.
    """
    job.post_json(contract.STOP_PATH, msgspec.json.encode({"reason": given.reason}))
    print(f"run {given.run_id} is stopping")


ACTIONS = {f.__name__: f for f in (status, top, hosts, events, logs, stacks, scale)}
ACTIONS |= {f.__name__: f for f in (apply, drain, stop)}
ACTIONS["open"] = open_page
