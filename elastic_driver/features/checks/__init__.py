"""Node checks: which hosts are faulty or slow, before the job trains and when hosts come."""
