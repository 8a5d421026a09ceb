"""Peer memory: ranks on one host read each other's memory. Imported only where a process group may use it."""
