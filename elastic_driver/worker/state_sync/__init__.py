"""The synchronisation of states between ranks: their parts, and the transfer."""
