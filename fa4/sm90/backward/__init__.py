"""The backward kernel of two warpgroups: one file per warp role."""
