"""The rendezvous: a typed KV store over HTTP; it knows nothing of ranks or training."""
