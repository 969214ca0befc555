"""Loop kernels to code for GPUs: the bodies of `stitch/loops.py`, one element to a thread."""
