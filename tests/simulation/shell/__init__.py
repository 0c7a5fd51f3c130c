"""Level two of the simulation: the real supervisor, server, store and disk cache under virtual
time, with engines, disks, clients and clocks that misbehave."""
