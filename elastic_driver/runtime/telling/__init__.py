"""What is told of the job: its event log, its lines on stderr, what failed workers said last."""
