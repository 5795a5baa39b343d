"""Horovod's API for jobs whose workers come and go: `hvd.elastic`."""

from elastic_driver.horovod.common.elastic import ObjectState as ObjectState
from elastic_driver.horovod.common.elastic import broadcast_with
from elastic_driver.horovod.common.elastic import run as run
from elastic_driver.horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from elastic_driver.horovod.torch.elastic.state import TorchState as TorchState
from elastic_driver.horovod.torch.functions import broadcast_object

broadcast_with(broadcast_object)
