"""The forward kernel on a Hopper GPU: what it does alike on every one (`neutral`), and the whole
kernel without a tensor core or with one of plain instructions (`skeleton`)."""
