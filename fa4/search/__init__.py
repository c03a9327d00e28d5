"""The search for designs: plans that nobody has drawn, simulated with all sets of constants."""
