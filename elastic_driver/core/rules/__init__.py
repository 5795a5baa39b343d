"""The rules of the job machine, each the owner of its part of the state; pure."""
