"""All machines that a driver may run: the job, and those of the features."""

from elastic_driver.features import chapters
from elastic_driver.job import job
from elastic_driver.kernel.kernel import Catalog

# A next driver tells those that go on in this order that it has come.
MACHINES = Catalog(
    (
        job.DECLARATION,
        *(declared for chapter in chapters("machine") for declared in chapter.MACHINES),
    )
)
