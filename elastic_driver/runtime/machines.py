"""All machines that a driver may run, each as its own module declares it."""

from elastic_driver.core import job
from elastic_driver.features.checks import machine as checker
from elastic_driver.features.shards import machine as shards
from elastic_driver.features.sizes import machine as starvation
from elastic_driver.features.sizes import messages as scaling
from elastic_driver.features.stragglers import machine as stragglers
from elastic_driver.features.tensorflow import machine as tf_cluster
from elastic_driver.kernel.kernel import Catalog

# A next driver tells those that go on in this order that it has come.
MACHINES = Catalog(
    (
        job.DECLARATION,
        checker.DECLARATION,
        shards.DECLARATION,
        tf_cluster.DECLARATION,
        stragglers.DECLARATION,
        scaling.AUTO_SCALER,
        starvation.DECLARATION,
    )
)
