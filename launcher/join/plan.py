"""The command line of a node that joins."""

from dataclasses import dataclass
from pathlib import Path

from elastic_driver.console import say_note
from elastic_driver.settings import Settings
from launcher.launch.hosts import Join
from launcher.network import bracketed
from launcher.options.table import LaunchOptions


@dataclass(frozen=True)
class JoinPlan:
    """The command line of a node that joins."""

    server: Join
    slots: int | None  # None: the server's number
    options: LaunchOptions
    settings: Settings
    state_dir: Path
    command: tuple[str, ...] = ()  # the command typed here; the server's command runs
    insecure: bool = False  # the server may speak plain HTTP
    tls_ca: str | None = None  # file with the CA of the server's certificate; None: no CA is asked

    @property
    def place(self) -> str:
        """The server's address as it is written in a URL."""
        return f"{bracketed(self.server.host)}:{self.server.port}"

    def say(self, sentence: str) -> None:
        """Show a sentence on stderr, unless --quiet was given."""
        if not self.options.quiet:
            say_note(sentence, as_json=self.options.log_format == "json")
