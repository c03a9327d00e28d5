"""The figures that explain FlashAttention-4, each made by `fa4 figures NAME` from the code itself.

A `FigureEntry` has its numbers (`collect`, plain data with a table), its drawing and its sources.
The table is the figure's text: what `--json` prints, and what a screen reader is given.
"""
