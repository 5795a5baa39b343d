"""What workers print: from their pipes to files, to our terminal, and to the report of an end."""
