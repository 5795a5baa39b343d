"""Checks of a plan before anything is started, and the address that its rendezvous listens on.

`launcher.run_job` calls `check_plan` with a finished plan, also for --dry-run. It reads the file
system and changes nothing there, except that `create` makes the log folder. Each finding is a
`UsageError` of one line.

The statistics of a job need SQLAlchemy, an extra that takes a moment to load: it is loaded here
only for a job whose user has named a database. A job without SQLAlchemy simply keeps no statistics.

The address is chosen so that all hosts of the job reach it.
"""

import contextlib
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from elastic_driver.brain.store.address import Address
from elastic_driver.errors import ClusterError, ElasticError, UsageError
from elastic_driver.runtime.discovery import FixedDiscovery, HostDiscovery, Hosts
from elastic_driver.runtime.endpoint import of_site
from elastic_driver.runtime.run_dir import RunDir
from launcher.backends.base import DISCOVERY, load, make_backend
from launcher.backends.slurm_allocation import AllocationDiscovery
from launcher.edge import find_shadow, refuse_bytes
from launcher.launch.host_source import ANYWHERE, BrainHosts, FixedHosts, HostSource, JoinedHosts
from launcher.launch.plan import LaunchPlan
from launcher.network import address_of, addresses_of, find_address, is_this_machine
from rendezvous.client_connections import is_loopback

_LOOKUPS_AT_ONCE = 32


def choose_bind_host(
    bind: str, hosts: Hosts, interfaces: Sequence[str], look_up: Callable[[str], str]
) -> str:
    """Return the numeric address to listen on; a wildcard if the hosts are on several networks.

    Args:
        bind: the host of --rdzv-endpoint. Loopback, the default, is replaced if there are
            hosts that could not reach it.
        hosts: the known hosts.
        interfaces: --network-interfaces; the hosts have them, this machine may have others.
        look_up: returns the name by which the network knows a host.

    Raises:
        UsageError: `bind` has no address here.
        ClusterError: none of the hosts could reach the job.
    """
    given = numeric_address(bind)
    # A machine's own name may be loopback (Debian's 127.0.1.1), which other hosts cannot use.
    remote = [host for host, slots in hosts if slots and not is_this_machine(host)]
    if not ipaddress.ip_address(given).is_loopback or not remote:
        return given
    if (named := address_of(interfaces)) is not None:
        return named[0]
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE) as pool:
        found = set(filter(None, pool.map(lambda host: find_address(host, look_up), remote)))
    if not found:
        raise ClusterError(
            f"no way to {', '.join(remote)}: no name has an address here, and there is no default "
            "route; say at which address of this machine they reach the job, with --rdzv-endpoint "
            "ADDRESS"
        )
    if len(found) == 1:
        return found.pop()
    return "::" if any(":" in address for address in found) else "0.0.0.0"  # noqa: S104


def bind_again(chosen: str, url: str) -> str:
    """Return the address for a driver that goes on with a job: one where agents look for it.

    Args:
        chosen: the address that a new job would have, with the hosts of now.
        url: the address of the last driver, with loopback in place of a wildcard; "": unknown.
    """
    before = urlsplit(url).hostname
    now = ipaddress.ip_address(chosen)
    if before is None or now.is_unspecified:
        return chosen
    if not ipaddress.ip_address(before).is_loopback:
        return before if is_this_machine(before) else chosen
    if now.is_loopback:
        return chosen
    return "::" if now.version == 6 else "0.0.0.0"  # noqa: S104


def numeric_address(host: str) -> str:
    """Return the numeric address to bind for a host's name; raises UsageError if it has none."""
    for address in addresses_of(host):
        return address
    raise UsageError(f"--rdzv-endpoint: the name {host} has no address here")


# ---- the server of nodes that join -------------------------------------------------------


def names_this_machine(host: str) -> bool:
    """Return whether a name or address is this machine's; this may ask a name server."""
    return is_this_machine(host) or any(map(is_this_machine, addresses_of(host)))


def can_serve(host: str, port: int) -> bool:
    """Return whether a name or address is this machine's, and the port is free here now.

    This may ask a name server.
    """
    if not names_this_machine(host):
        return False
    address = bind_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.create_server((address, port), family=family):
        return True
    return False


def bind_address(host: str) -> str:
    """Return the numeric address to listen on for nodes that know the server by this name.

    It is the wildcard for a name that belongs to another machine (a service's name), and for a name
    with a loopback address other than `localhost` (Debian gives a machine's own name 127.0.1.1).
    """
    if host in ANYWHERE or is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    own = [a for a in addresses_of(host) if is_this_machine(a) and not is_loopback(a)]
    return own[0] if own else ANYWHERE[0]


def check_plan(plan: LaunchPlan, *, create: bool) -> None:
    """Raise UsageError for the first thing that cannot work; `create`: make the log folder."""
    spec = plan.spec
    _check_text(plan)
    cwd = Path(spec.cwd)
    environ = {**plan.agents.environ, **spec.env}
    if plan.settings.auto_scale and find_spec("scipy") is None:
        hint = "pip install 'elastic-driver[brain]' where elasticrun runs"
        raise UsageError(f"--auto-scale needs SciPy, which is not installed; {hint}")
    _check_command(spec.command, cwd, environ)
    _check_shadows(spec.command, cwd, environ)
    if not isinstance(plan.hosts, JoinedHosts):
        make_discovery(plan.hosts)
        make_backend(plan.backend, plan.agents).check(plan.agents.hosts)
    if spec.log_dir is not None:
        _check_log_dir(cwd / spec.log_dir, create=create)
    of_site(plan.driver)
    check_installed(plan.options.stats_db)
    if plan.fallback is not None:
        check_plan(plan.fallback, create=create)
    if plan.backend == "local":  # other hosts may have other interfaces
        _check_interfaces(spec.env.get("GLOO_SOCKET_IFNAME", ""))


def _check_text(plan: LaunchPlan) -> None:
    """Raise UsageError for bytes that no document can carry to agents and workers."""
    spec = plan.spec
    for word in (*plan.line.words, *spec.command):
        refuse_bytes("an argument", word)
    for what, text in (("working", spec.cwd), ("state", plan.state_dir)):
        refuse_bytes(f"the {what} folder's path", text)
    for name, value in spec.env.items():
        refuse_bytes(f"the variable {name}", value)


def make_discovery(source: HostSource) -> HostDiscovery:
    """Return the discovery of these hosts; raises UsageError if it cannot work."""
    if isinstance(source, JoinedHosts):
        raise AssertionError("nodes that join are no discovery's; see launcher.join")
    if isinstance(source, BrainHosts):
        return FixedDiscovery(())  # nobody asks it: the driver's link to the Brain says more
    if isinstance(source, FixedHosts):
        if source.allocation is None:
            return FixedDiscovery(source.hosts)
        return AllocationDiscovery(source.allocation, source.hosts, os.environ)
    make = load(DISCOVERY, source.discovery)
    try:
        discovery: HostDiscovery = make(
            source.argument, default_slots=source.default_slots, timeout=source.timeout
        )
    except ElasticError:
        raise
    except Exception as error:  # another package's code may raise anything
        problem = f"--host-discovery {source.source}: {type(error).__name__}: {error}"
        raise UsageError(problem) from error
    return discovery


# ---- the command -------------------------------------------------------------------------


def _check_command(command: tuple[str, ...], cwd: Path, environ: Mapping[str, str]) -> None:
    program, *arguments = command
    if os.sep in program:
        hint = f"is not executable; try chmod +x {program}"
        _check_file(f"the command {program}", cwd, program, os.X_OK, hint)
    elif shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        hint = f"did you mean ./{program}?" if (cwd / program).is_file() else "check PATH"
        raise UsageError(f"the command {program} was not found; {hint}")
    if not is_python(program) or not arguments:
        return
    name = arguments[0]
    if name == "-m" and len(arguments) > 1:
        if program == sys.executable:
            _check_module(arguments[1], cwd, environ)
    elif not name.startswith("-") and name.endswith(".py"):
        hint = "cannot be read; check its permissions"
        _check_file(f"the script {name}", cwd, name, os.R_OK, hint)


def _check_file(what: str, cwd: Path, name: str, mode: int, hint: str) -> None:
    if (cwd / name).is_dir():
        raise UsageError(f"{what} is a folder")
    if not (cwd / name).exists():
        raise UsageError(f"{what} does not exist in {cwd}")
    if not os.access(cwd / name, mode):
        raise UsageError(f"{what} {hint}")


def is_python(program: str) -> bool:
    """Return whether a command is a Python interpreter, with a script or -m after it."""
    return program == sys.executable or Path(program).name.startswith("python")


def _check_module(module: str, cwd: Path, environ: Mapping[str, str]) -> None:
    """Look for the top package only: finding a submodule would import its parents."""
    top = module.partition(".")[0]
    folders = [str(folder) for folder in (cwd, *_python_path(cwd, environ))]
    if PathFinder.find_spec(top, folders) is None and find_spec(top) is None:
        raise UsageError(f"-m {module}: there is no module {top} in {cwd} or on Python's path")


def _check_shadows(command: tuple[str, ...], cwd: Path, environ: Mapping[str, str]) -> None:
    """Raise UsageError if workers would import a user's `rendezvous.py` in place of our package."""
    if not is_python(command[0]) or len(command) < 2:
        return
    script = command[1]
    first = cwd if script.startswith("-") else (cwd / script).resolve().parent
    if shadow := find_shadow([first, *_python_path(cwd, environ)]):
        raise UsageError(
            f"{shadow} would be imported by the workers in place of elastic-driver's own "
            f"package of that name; rename it, for instance to my_{shadow.name}"
        )


def _python_path(cwd: Path, environ: Mapping[str, str]) -> list[Path]:
    return [cwd / folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


# ---- files and interfaces ----------------------------------------------------------------


def _check_log_dir(path: Path, *, create: bool) -> None:
    problem = "Permission denied"
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            return
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            problem = "Not a directory"
        elif os.access(existing, os.W_OK | os.X_OK):
            return
    except OSError as error:
        problem = str(error.strerror)
    raise UsageError(f"cannot write to the log folder {path}: {problem}; choose another --log-dir")


def _check_interfaces(names: str) -> None:
    known = psutil.net_if_addrs()
    for name in filter(None, names.split(",")):
        # Both libraries also take prefixes (eth) and, NCCL, ^exclusions; these are let through.
        if not name.startswith(("^", "=")) and not any(k.startswith(name) for k in known):
            found = ", ".join(sorted(known))
            raise UsageError(f"there is no network interface {name} here; there are {found}")


# ---- the database of statistics -----------------------------------------------------------


def default_database(run_dir: RunDir) -> Address | None:
    """Return the database in the run's folder; None if it cannot be written here."""
    return Address(file=str(run_dir.statistics_file)) if find_spec("sqlalchemy") else None


def check_installed(address: Address | None) -> None:
    """Raise UsageError if a database that the user has named needs packages that are missing."""
    for package, extra in (("sqlalchemy", "brain"), ("psycopg", "postgres")):
        needed = address is not None and (extra == "brain" or address.url)
        if needed and find_spec(package) is None:
            hint = f"pip install 'elastic-driver[{extra}]' where elasticrun runs"
            raise UsageError(f"--stats-db needs {package}, which is not installed; {hint}")


def check_database(address: Address) -> None:
    """Open a database that the user has named; raises UsageError for what the user must mend.

    One that is away, locked or corrupt is no reason to begin no job: its driver tries again.
    """
    from elastic_driver.brain.store.database import (  # noqa: PLC0415 - see above
        Database,
        described,
        is_mistake,
    )

    database = Database(address)
    try:
        database.open()
    except Exception as error:
        if is_mistake(error):
            raise UsageError(
                f"--stats-db {address}: {described(error)}; mend the address"
            ) from error
    finally:
        database.close()
