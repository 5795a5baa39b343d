"""The first failure of a job as torchrun leaves it: in the file of TORCHELASTIC_ERROR_FILE.

Schedulers that start torchrun set this variable and read the file; its form is that of torch's
`@record` (torch.distributed.elastic.multiprocessing.errors).
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from elastic_driver.runtime.results import JobResult, describe_failure, last_words
from rendezvous.own_files import open_named

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def write_error_file(result: JobResult, environ: Mapping[str, str]) -> str:
    """Write the failure of a job that has one; return why that was impossible, "" otherwise."""
    name = environ.get(ERROR_FILE)
    if not name or result.exit_code == 0:
        return ""
    message, trace = result.reason, ""
    failure = result.failure
    if failure is not None:
        lines = last_words(failure.log_tail)
        trace = "\n".join(lines)
        message = lines[-1] if lines else describe_failure(failure)
    known = {"py_callstack": trace, "timestamp": str(int(result.ended))}
    if failure is not None:
        known |= {"rank": str(failure.rank), "host": failure.host, "worker": failure.worker}
    told = {"message": message, "extraInfo": known, "errorCode": result.exit_code}
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with open(open_named(name), "wb") as stream:
            stream.write(msgspec.json.encode({"message": told}))
    except OSError as error:
        return f"cannot write {ERROR_FILE} {name}: {error.strerror}"
    return ""
