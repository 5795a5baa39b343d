"""A chief that trains on parameter servers and workers, which never end by themselves."""

from __future__ import annotations

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf

task = json.loads(os.environ["TF_CONFIG"])["task"]
cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if task["type"] != "chief":
    server = tf.distribute.Server(
        cluster.cluster_spec(), job_name=task["type"], task_index=task["index"], protocol="grpc"
    )
    server.join()
strategy = tf.distribute.ParameterServerStrategy(cluster)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0)


@tf.function
def step() -> None:
    total.assign_add(1.0)


for _ in range(10):
    coordinator.schedule(step)
coordinator.join()
print(f"total {total.numpy():g}", flush=True)
