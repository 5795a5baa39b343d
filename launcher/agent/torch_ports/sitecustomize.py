"""Has torch listen at the ports of ELASTIC_PORTS, in every Python process of a worker.

`site` imports this module when the interpreter is set up. `torch` loads its library and then
imports `torch.distributed`; that is the moment to act. The real `sitecustomize`, if there is one,
is imported after that, as usual.
"""

import os
import sys
from typing import Any

_here = os.path.dirname(os.path.abspath(__file__))


class _BeforeDistributed:
    """Sees the import of `torch.distributed`, and finds nothing."""

    def find_spec(self, name: str, *_: object) -> Any:
        """Act once, when torch's library is loaded and nobody has used it."""
        if name == "torch.distributed" and self in sys.meta_path:
            sys.meta_path.remove(self)
            _listen_there()
        return None


def _listen_there() -> None:
    sys.path.insert(0, _here)
    try:
        __import__("_elastic_torch_ports").install(os.environ)
    finally:
        sys.path.remove(_here)


if "ELASTIC_PORTS" in os.environ:
    if "torch.distributed" in sys.modules:
        _listen_there()
    else:
        sys.meta_path.insert(0, _BeforeDistributed())

sys.path[:] = [_entry for _entry in sys.path if _entry != _here]
sys.path_importer_cache.pop(_here, None)
del sys.modules["sitecustomize"]
__import__("sitecustomize")  # the real one; `site` expects the ImportError where there is none
