"""A process beside each rank that ends it when the job has failed anywhere, and says why.

No torch, so that it needs little memory and starts at once. `protocol` has the variables and the messages. May import:
network, and the ground.
"""
