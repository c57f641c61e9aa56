"""Hosts, their addresses and interfaces, ssh, and connections that notice when the other end is gone.

No torch. May import: the ground.
"""
