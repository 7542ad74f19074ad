"""PTX, the machine-level code that Triton compiles a kernel into, executed without a GPU.

`card` stands where Triton expects a driver: the product's launchers are called with tensors of the CPU, Triton binds and
compiles as it does for an H200, and what it would have handed to the card is executed on the memory of those tensors.
`program` reads the text, `block` runs one block of threads after another with numpy, a register of all threads in an array, and
`memory` refuses what a card would fault on or what would depend on chance. An instruction, a modifier or an operand that is not
known is an error before anything runs. Results follow the PTX ISA, version 8.7; each module names its sections.
"""
