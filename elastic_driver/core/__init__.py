"""The pure core: events and the time go in, decisions with their reasons come out."""
