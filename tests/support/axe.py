"""axe-core (https://github.com/dequelabs/axe-core) looks for what keeps people from using a page.

`tests/install-parts.sh` installs it, from a wheel that brings it along.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import Tab

SCRIPT = Path("/opt/elastic-test-parts/axe/axe_playwright_python/axe.min.js")
needs_axe = pytest.mark.skipif(not SCRIPT.exists(), reason="axe-core is not installed")
_RUN = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(
    each => `${each.impact}: ${each.help}: ${each.nodes.map(node => node.target).join(' ; ')}`))"""


async def faults(page: Tab) -> list[str]:
    """Return what is wrong on the page as it is now: how bad, the rule, the elements."""
    await page.evaluate(SCRIPT.read_text(encoding="utf-8") + "; true")
    found: list[str] = await page.evaluate(_RUN)
    return found
