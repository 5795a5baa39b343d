"""The HTTP routes of a driver: the job, its metrics, its data shards, TensorFlow clusters."""
