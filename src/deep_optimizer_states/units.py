"""Units of memory. A GB is 10^9 bytes, a GiB is 2^30."""

MIB = 2**20
GIB = 2**30
