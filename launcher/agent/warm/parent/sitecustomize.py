"""Turns an interpreter into a warm parent, and a fork of it into a worker.

`site` imports this module after the interpreter is set up and before it runs its command. Here
the warm parent stays until its end. In a worker that was forked from it, the import returns, and
the interpreter runs the command as a new one would. The real `sitecustomize`, if there is one, is
imported in the worker, at the usual moment.

An error must end the process: otherwise the training script would run in the warm parent.
"""

import os
import sys

_baseline = frozenset(sys.modules)
_here = os.path.dirname(os.path.abspath(__file__))
_descriptors = os.environ.pop("ELASTIC_WARM_FDS", None)

if _descriptors is not None:
    try:
        __import__("_elastic_warm_parent").serve(_descriptors, _baseline)
    except BaseException:  # any error at all: see above
        import traceback

        traceback.print_exc()
        os._exit(70)

sys.path[:] = [_entry for _entry in sys.path if _entry != _here]
sys.path_importer_cache.pop(_here, None)
for _name in [_name for _name in sys.modules if _name.startswith("_elastic_warm_")]:
    del sys.modules[_name]
del sys.modules["sitecustomize"]

__import__("sitecustomize")  # the real one; `site` expects the ImportError where there is none
