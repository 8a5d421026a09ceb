"""Hosts on one machine: network namespaces that a switch joins, whose delay, loss, rate and links can be changed."""
