"""Reading PTX: the syntax tree and the parser."""
