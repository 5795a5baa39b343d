"""The shared warm parent: further agents of its machine are forked from it, warm parents and all.

It is a child of the process that starts the machine's agents (`launcher.backends.shared_parent`),
and has imported what workers need. A request comes as one datagram with four descriptors: the
agent's stdin, stdout and stderr, and a channel for the rest: what to execute (from the backend),
the pid (from the agent), "go" (from the backend). A process that finds the channel ended forgets
the request, so that no agent runs that the backend does not know of.

Two processes come of a request: the agent, a child of the backend's process, which executes its
command; and before that, forked from it, its warm parent, which has all imports behind it.
"""

import contextlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from launcher.agent.warm.parent import _elastic_warm_common as common
else:
    import _elastic_warm_common as common

_REQUEST_SECONDS = 10.0  # the backend says it all at once; longer means that it has given up
_BORN_WARM = "ELASTIC_BORN_WARM"  # as `elastic_driver.contract` has it
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)

Ends = tuple[socket.socket, socket.socket]  # of a warm parent: its queue, its status


def bind_to(backend: int) -> None:
    """End with the process that asks for agents, and ignore Slurm's signals to all processes."""
    common.die_with(backend)
    if "SLURM_STEP_ID" in os.environ:
        for number in _NOTICES:
            signal.signal(number, signal.SIG_IGN)


def fork_agents(setup: dict[str, Any], queue: socket.socket, status: socket.socket) -> Ends:
    """Fork agents for ever; returns only in an agent's warm parent, with its ends.

    There `setup` then names the agent as the parent.
    """
    common.send_line(status, setup["ready"])
    while True:
        ready, _, _ = select.select([queue, status], [], [])
        if status in ready:  # the backend speaks once; this is its end
            os._exit(0)
        data, received, _, _ = socket.recv_fds(queue, 16, 4)
        if not data:
            os._exit(0)
        if common.fork_apart() is None:
            queue.close()
            status.close()
            return _be_agent(setup, received)
        for fd in received:
            os.close(fd)


def _be_agent(setup: dict[str, Any], received: list[int]) -> Ends:
    """Agree with the backend, then execute; returns in the warm parent that was forked before.

    Until the backend has said go, both are in the session of the shared parent: that is how it
    finds and ends what has come of a request that it gave up.
    """
    if os.getppid() != setup["parent"]:  # it died, or does not adopt orphans
        os._exit(0)
    *stdio, channel_fd = received
    channel = socket.socket(fileno=channel_fd)
    channel.settimeout(_REQUEST_SECONDS)
    request = common.receive_line(channel)
    queue, its_queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    status, its_status = socket.socketpair()
    log = os.memfd_create("warm-parent")
    agent = os.getpid()
    if warm := os.fork():
        common.send_line(channel, {"pid": agent, "warm": warm})
        if channel.recv(2) != b"go":
            os._exit(0)
        os.setsid()
        common.prctl(common.PR_SET_CHILD_SUBREAPER, 1)  # its spares come early
        common.send_line(status, {"parent": agent})
        held = (queue.fileno(), status.fileno(), log)
        request["env"][_BORN_WARM] = ",".join(map(str, (warm, *held, setup["shared"])))
        _execute(request, stdio, held)
    for theirs in (queue, status, channel):
        theirs.close()
    for fd in stdio:
        os.close(fd)
    _be_its_parent(setup, agent, its_status, log)
    return its_queue, its_status


def _be_its_parent(setup: dict[str, Any], agent: int, status: socket.socket, log: int) -> None:
    """Become the warm parent of an agent, and wait for its word."""
    common.die_with(agent)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    status.settimeout(_REQUEST_SECONDS)
    try:
        setup.update(common.receive_line(status))
    except (OSError, EOFError):
        os._exit(0)
    status.settimeout(None)
    os.setsid()


def _execute(request: dict[str, Any], stdio: list[int], held: tuple[int, ...]) -> NoReturn:
    """Become the agent's program, as a new process would."""
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory is closed again
            os.set_inheritable(int(name), int(name) <= 2 or int(name) in held)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["cwd"])
    argv = request["argv"]
    os.execvpe(argv[0], argv, request["env"])  # noqa: S606 - the agent's own, from our backend
