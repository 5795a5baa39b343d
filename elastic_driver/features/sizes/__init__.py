"""The number of workers with which a job trains best, searched while it trains."""
