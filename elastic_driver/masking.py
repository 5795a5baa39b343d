"""Secrets in what people see: values with names like secrets are shown as `***`. Pure.

A command line, a plan and a status go to terminals, tickets and metrics. Variables count as secret
by a part of their name (WANDB_API_KEY, DB_PASSWORD), options by its last word (--api-key, but not
--tokenizer or --max-tokens).
"""

import re
from collections.abc import Iterable

MASK = "***"
_VARIABLE = re.compile(r"TOKEN|SECRET|KEY|PASS|CREDENTIAL|AUTH")
_OPTION = re.compile(
    r"(?:^|[-_.])(?:token|secret|key|apikey|passwd|password|passphrase|credentials?)$",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Z][A-Z0-9_]*\Z")
_USER_OF_URL = re.compile(r"(?<=://)([^/@\s:]*):[^/@\s]+@")


def is_secret(variable: str) -> bool:
    """Return whether the name of a variable looks like a secret's."""
    return _VARIABLE.search(variable.upper()) is not None


def masked(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command line without the values that look like secrets."""
    shown: list[str] = []
    hide = False  # the value of the option before
    for word in words:
        name, equals, value = word.partition("=")
        option = name.lstrip("-")
        secret = is_secret(name) if _NAME.match(name) else _OPTION.search(option) is not None
        if hide and not word.startswith("-"):
            shown.append(MASK)
            hide = False
            continue
        hide = secret and not equals and word.startswith("--")
        hidden = secret and equals and value
        shown.append(f"{name}={MASK}" if hidden else without_password(word))
    return tuple(shown)


def without_password(text: str) -> str:
    """Return a text without the passwords of URLs in it (`https://user:***@host`)."""
    return _USER_OF_URL.sub(rf"\1:{MASK}@", text)
