"""The simulated engine: real block tables, real reads, made-up arithmetic.

What is real: the pool with its reference counts and prefix cache, holds and pins, the scheduler's queues
and preemptions, the handles, the guard, reads between engines of one process or of several. What is made
up: time, which a cost model tells, and the tokens, which are a digest of the token ids that the blocks
were filled with. An engine that reads, keeps or hands out the wrong blocks says something wrong.
"""
