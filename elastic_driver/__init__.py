"""Who trains, with which rank, until when."""
