"""All machines that a driver may run, each as its own module declares it."""

from elastic_driver.job import job
from elastic_driver.kernel.kernel import Catalog
from elastic_driver.policies import shards, stragglers, tf_cluster
from elastic_driver.policies.nodecheck import checker
from elastic_driver.policies.scaling import messages as scaling
from elastic_driver.policies.scaling import starvation

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
