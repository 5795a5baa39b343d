"""Who has to go, and how in good order: hosts, workers, slow ones, the whole job; pure."""
