"""The roles of a job's and a Brain's tokens, and how the tokens of each are derived.

An agent makes the tokens of its workers, and the driver of a Brain's job the token of that job. The
name of an owner is the host of an agent, the name of a node, the id of a worker, or the run id of a
job. `elastic_driver.rights` says what each role may do. Pure.
"""

from rendezvous.access import Roles
from rendezvous.auth import Role, derived_token


def agent_token(driver_token: str, host: str) -> str:
    """Return the token of the agents of this host."""
    return derived_token(driver_token, AGENT, host)


def node_token(driver_token: str, name: str) -> str:
    """Return the token of a node that has joined under this name."""
    return derived_token(driver_token, NODE, name)


def worker_token(agent_token: str, worker: str) -> str:
    """Return the token of a worker, whose id is `<host>.<slot>.<incarnation>`."""
    return derived_token(agent_token, WORKER, worker)


def jobs_token(brain_token: str) -> str:
    """Return the secret that the tokens of all jobs of a Brain are derived from.

    It is no token itself: a server does not take it.
    """
    return derived_token(brain_token, JOB)


def job_token(token: str, job: str) -> str:
    """Return the token of a job; `token`: the Brain's own one, that of all jobs, or this one."""
    if token.startswith(f"{JOB.value}:"):
        of_all = token.startswith(f"{JOB.value}::")
        return derived_token(token, JOB, job) if of_all else token
    return derived_token(jobs_token(token), JOB, job)


def own_token(token: str, host: str) -> str:
    """Return the token of the agent of this host, if need be derived from the driver's.

    A backend may start its agents with either.
    """
    return token if token.startswith(f"{AGENT.value}:") else agent_token(token, host)


def _token_of_agent(driver_token: str, worker: str) -> str:
    return agent_token(driver_token, worker.rsplit(".", 2)[0])


AGENT = Role("agent")
WORKER = Role("worker", key=_token_of_agent, crowd=True)
NODE = Role("node")
JOB = Role("job", key=lambda brain_token, _job: jobs_token(brain_token), has_subject=True)
ALL = (AGENT, WORKER, NODE, JOB)  # beside those of each server: driver, operator, reader

# ---- roles that rows of routes and keys name together ------------------------------------

MEMBERS: Roles = frozenset({AGENT, WORKER})
PEOPLE: Roles = frozenset({Role.OPERATOR, Role.READER})
WATCHERS: Roles = PEOPLE | {WORKER}
OPERATORS: Roles = frozenset({Role.OPERATOR})
AGENTS: Roles = frozenset({AGENT})
WORKERS: Roles = frozenset({WORKER})
NODES: Roles = frozenset({NODE})
JOBS: Roles = frozenset({JOB})
TRAINERS: Roles = WORKERS | OPERATORS
