"""Numbers that several rooms share."""

MIB = 1 << 20  # bytes; what `bucket_size_mb` counts

MAX_INT = 2**31 - 1  # what numpy and torch must hold in 32 bits
