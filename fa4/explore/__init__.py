"""`fa4 explore`: plan, timeline, memory, barriers and predictions as one page that runs offline.

Everything on the page is computed before: predictions and one steady-state step of every pipeline
that its controls can describe (`controls`, `grid`, `recording`), packed (`packing`) into one HTML
file (`page`) together with the emulator's verdicts on removed barriers (`verdicts`).
"""
