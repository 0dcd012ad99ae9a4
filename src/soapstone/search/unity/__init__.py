"""Unity's joint search: substitutions and machine mappings together.

views       where blocks may run: ranges of devices, and placements on them
tables      what parts of a graph cost at least, and how that is joined
mapping     machine mappings by dynamic programming
splitting   a graph in parts that are rewritten one at a time
selecting   substitutions by cost-based backtracking
alike       blocks that look alike, moved together by the simulator
joint       all of it, then the simulator and Markov chains
"""

from soapstone.search.unity.joint import Setting, joined, unity

__all__ = ["Setting", "joined", "unity"]
