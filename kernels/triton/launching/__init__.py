"""What all launches share, whatever their kernel.

properties of the card    card_properties
early launches            early_launch: a kernel is launched before its predecessor has completed
compilation               compiled_together, before serving; kernel_cache, on disk
"""
