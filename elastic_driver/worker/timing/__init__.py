"""What a rank's steps cost it, without the time it waits for others: its computing, its links."""
