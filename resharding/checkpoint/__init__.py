"""Checkpoints that no parallelism owns: whole tensors under canonical names, written from and read into boxes.

A folder of such a checkpoint is one more holder of boxes (see ``resharding.boxes``): the planner that resizes a live
job also decides who writes what, and what each rank reads. Nothing in a folder is executed when it is read.

``format``   what lies in the index, and its checks; ``folder``: names, order, and what is complete
``sums``     a digest of a tensor that adds up from digests of its boxes
``fused``    parts of fused tensors (q, k, v; gate, up; experts) as data
``files``    headers of data files, and boxes to and from their bytes
``writer``   from holdings to files, ``reader``: from files into holdings
"""
