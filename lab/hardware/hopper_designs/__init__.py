"""The search for designs where truth exists: what it finds for Hopper, measured on an H200."""
