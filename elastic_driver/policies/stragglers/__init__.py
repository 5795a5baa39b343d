"""Who is slow, rank or link, and which work moves away from it; pure."""
