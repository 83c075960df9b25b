"""How strong an audit's inputs are: single faults planted in the reference, judged as candidates.

kinds.py     the table of faults, one small function each
carry.py     sums carried in too few bits, spelled out
mutants.py   a fault at one operation of the reference's trace, and how to run it
nulls.py     candidates that compute nothing
aim.py       inputs aimed at a fault that lives
score.py     which of them an audit's cases expose, and hardening
"""
