"""What a job has beside its workers: a folder each, named by the chapters that it has."""
