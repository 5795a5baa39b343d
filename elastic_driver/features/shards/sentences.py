"""What people read of data shards."""

from elastic_driver.features import Sentences
from elastic_driver.features.shards.messages import ShardBatch
from elastic_driver.words import counted

SENTENCES = Sentences(
    events={ShardBatch: lambda batch: counted(len(batch.requests), "request") + " for shards"}
)
