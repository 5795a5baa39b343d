"""The node check: finds faulty and slow nodes before training, by tasks run in pairs; pure."""
