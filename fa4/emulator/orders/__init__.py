"""Orders of events: looked for, kept and replayed."""
