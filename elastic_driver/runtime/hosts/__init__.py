"""Where hosts come from: lists, scripts, nodes that join; and what starts an agent on one."""
