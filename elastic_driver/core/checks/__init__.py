"""What a check of nodes consists of beside its verdicts (`core.nodecheck`); pure."""
