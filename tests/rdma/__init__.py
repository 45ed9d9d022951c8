"""RDMA without a card: a Debian kernel with Soft-RoCE in QEMU, and in it the kvxfer that was just built."""
