"""Operations on whole rows of hidden states. A program holds one or several rows in registers.

norms                     norm
activations               activation
rows in 8 bits            fp8; norm and activation quantise their results with it
parts                     tiles
"""
