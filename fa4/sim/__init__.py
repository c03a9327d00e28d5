"""Discrete-event simulator: executes a plan's programs on a machine's units and predicts speed.

Main path: `defaults` choose a pipeline for a problem, `plan` describes it, `costs` give its work
cycles, `lower` turns it into arrays, `engine` runs one SM, `chip` all of them, `predict` reports.
"""
