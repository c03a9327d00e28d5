"""The Hopper backward kernel on a GPU: checked, and timed beside others."""
