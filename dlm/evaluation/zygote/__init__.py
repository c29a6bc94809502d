"""The process that runs programs, started by `sandbox` as one of its own: standard library only. Judges nothing.

`serving` reads programs and forks a `child` for each; `watch` ends it; `walls` are the namespaces around them all. It is
PID 1 of its namespace, so a program can neither kill it nor outlive it.
"""

BUSY = 3  # times its own time that a program may get where the processors are busy with others
