"""The engine of every machine; it knows no training."""
