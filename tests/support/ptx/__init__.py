"""An emulator of PTX, the virtual machine code that Triton compiles kernels into, for machines without a GPU.

`card` replaces Triton's driver: the product's launchers are called with CPU tensors, Triton specialises and compiles as for an
H200, and the PTX is executed on the memory of those tensors. `program` parses the text, `block` executes thread blocks one
after another with numpy (a register of all threads is one array), and `memory` detects accesses that would fault on a card or
whose result would be undefined. Unknown instructions, modifiers and operands are errors before anything runs. Semantics follow
the PTX ISA, version 8.7; each module names its sections.
"""
