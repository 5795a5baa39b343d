"""TensorFlow: its TF_CONFIG, and the cluster that an orchestrator meets in; pure."""
