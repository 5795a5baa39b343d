"""`hvd.elastic`: jobs whose workers come and go."""

from elastic_driver.horovod.common.elastic import ObjectState as ObjectState
from elastic_driver.horovod.common.elastic import run as run
from elastic_driver.horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from elastic_driver.horovod.torch.elastic.state import TorchState as TorchState
