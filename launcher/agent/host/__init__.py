"""What the agent takes of its host, and gives back: folders, ports, and the host's own end."""
