"""Systems to compare with that have no launcher of their own."""
