"""Where candidate code runs: a fresh, confined process per session.

process.py     the parent's side: ForkServer and Session
forkserver.py  a process that has imported torch and forks a fresh child in milliseconds
keeper.py      stands over one child: drains what it prints, watches its memory, ends it with all it started
child.py       holds the candidate and executes calls; never judges
observed.py    what the child notes around a call: patched functions, changed flags, threads
sandbox.py     the layers that confine a child, each used where the machine offers it
linux.py       the system calls behind them
tensors.py     tensors as declared bytes
wire.py        length-checked messages
"""
