"""The options of `elasticrun`: the table, the readers of values, and the text of --help."""
