"""Random calls of everything public, valid and not, each against an oracle or for a clear refusal.

``oracle`` has plain float64 loops that share no code with the package; ``arrays`` draws graphs and damages arguments;
``cases`` has a function per subject that makes one call; ``__main__`` makes many, in processes that may crash.
"""
