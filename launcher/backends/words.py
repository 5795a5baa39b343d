"""Failures of programs and logins in one line: their own words, and what we make of them."""

from launcher.agent.marks import NO_STDOUT
from launcher.backends.client import Login

_MAX_LINES, _MAX_CHARS = 3, 300
_FRAME = " @*=-#"  # lines of nothing else frame a message
# What ssh says beside the point, and what a login file says when it takes us for a terminal.
_ASIDE = (
    *("Warning: Permanently added", "Pseudo-terminal will not be allocated", "stdin: is not a tty"),
    *("mesg: ", "stty: ", "tput: ", "elasticrun: "),
)
FILES = "its login files (such as ~/.bashrc)"
ONLY_INTERACTIVE = "let only interactive shells do that ([[ $- == *i* ]]; see docs/hosts.md)"


def in_its_words(said: str, mark: str = "") -> str:
    """Return the last lines of what a program wrote as one, without frames; empty: it said nothing.

    Lines beside the point are left out if there are others. If the line with the `mark` is not one
    of the last, it is that line.
    """
    lines = [line.strip().strip("@").strip() for line in said.splitlines() if line.strip(_FRAME)]
    shown = [line for line in lines if not line.startswith(_ASIDE)] or lines
    last = shown[-_MAX_LINES:]
    marked = [line for line in shown if mark and mark in line]
    if marked and not any(mark in line for line in last):
        last = marked[:1]
    return " / ".join(dict.fromkeys(last))[:_MAX_CHARS]


def quoted(said: str) -> str:
    """Return ` and said "…"`; empty if nothing was said."""
    words = in_its_words(said)
    return f' and said "{words}"' if words else ""


def describe_login(host: str, exit_code: int, said: str, login: Login) -> str:
    """Return one line on a login in which our command did not run, or did not get its input.

    `exit_code` is the login's, `said` what came on stderr.
    """
    if exit_code == NO_STDOUT:
        return f"{host}: {FILES} send stdout elsewhere (exec >…); {ONLY_INTERACTIVE}"
    if login.reached:
        return f"{host}: {FILES} read stdin to its end; {ONLY_INTERACTIVE}"
    words = quoted(f"{login.said.decode(errors='replace')}\n{said}")
    ended = f"ended with exit status {exit_code} before our command{words}"
    if login.closed:
        hint = f"if {FILES} exec another shell or program, {ONLY_INTERACTIVE}"
        replaced = "was replaced by a program that read stdin"
        return f"{host}: its login shell {replaced}, and {ended}; {hint}"
    hint = f"if {FILES} call exit or exec, {ONLY_INTERACTIVE}"
    if "account is currently not available" in words:
        hint = "this account has no login shell there (nologin)"
    return f"{host}: its login shell {ended}; {hint}"
