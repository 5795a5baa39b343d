"""TensorFlow clusters that form over HTTP, their barriers and exchanges."""
