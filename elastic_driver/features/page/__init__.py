"""The page of a job in a browser, and in a file when the job is over."""
