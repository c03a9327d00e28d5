"""The Hopper forward kernel on a GPU: checked, and timed beside others."""
