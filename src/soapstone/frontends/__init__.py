"""Ways in: PyTorch modules, Hugging Face configurations, a person's own file, and the zoo.

source      MODEL, as a user writes it, becomes a module with example inputs
program     a module becomes torch's exported program, or a sentence that says why not
capture     the exported program becomes a Graph
expansions  ATen operators that are several of ours
"""
