"""An attention call: its options, one frozen record made and checked once, who computes it."""
