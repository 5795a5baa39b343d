"""Where processes meet: a typed KV store over HTTP; it knows nothing of ranks or training."""
